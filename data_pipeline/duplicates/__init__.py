"""Near-duplicates: signatures, buckets, components, decisions."""
