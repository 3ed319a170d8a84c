"""What a person imports and types: the client, the command line, the generated stubs."""
