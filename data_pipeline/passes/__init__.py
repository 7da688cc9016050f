"""What the pipeline has its tasks do, pass by pass."""
