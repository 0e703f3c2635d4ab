"""The ways in which the weights of linear layers are stored and multiplied: a file each."""
