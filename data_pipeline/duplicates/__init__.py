"""The search for near-duplicates: buckets of documents, components, and decisions about them."""
