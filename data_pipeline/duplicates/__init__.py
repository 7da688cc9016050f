"""Near-duplicates: buckets, components, decisions."""
