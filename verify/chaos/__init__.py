"""What happens to a whole reproduction when it is killed, stopped or starved at any of its writes."""
