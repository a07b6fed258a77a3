"""A training on a cluster, told from its events: throughput, failures, load, comparisons."""
