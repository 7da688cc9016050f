"""A complete run in the formats that others read. What its manifest, seal and results do not say is left out."""
