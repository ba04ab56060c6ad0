"""What is guessed ahead of the target: trees of candidates, where they come from, whether they pay."""
