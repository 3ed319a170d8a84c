"""What a person types: the commands of `baton`."""
