"""The sentences about a start that cannot succeed: the model's folder, and the end of a process."""
