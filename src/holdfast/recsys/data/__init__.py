"""Click data: Criteo and Parquet files, and a synthetic stream."""
