"""Which runs reproduce which published table or figure, on what hardware, and the published numbers themselves."""
