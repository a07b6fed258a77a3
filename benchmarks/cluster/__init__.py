"""The cluster: what coding costs while nothing fails, and what a lost server costs."""
