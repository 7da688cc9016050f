"""Sources of documents: pieces of files and their lines."""
