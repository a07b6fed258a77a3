"""Objects on S3 and on stores that speak its language."""
