"""Models of rising size, a law through their losses, and a forecast that is sealed before the largest is trained."""
