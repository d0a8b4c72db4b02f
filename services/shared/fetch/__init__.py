"""Fetches models: from the Hugging Face hub, S3, Google Cloud Storage or another folder, with Python's own library alone."""
