"""One module for each command. Each imports what it needs when it runs."""
