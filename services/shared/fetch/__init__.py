"""Downloads models from the Hugging Face hub, S3, Google Cloud Storage or a folder, with the standard library only."""
