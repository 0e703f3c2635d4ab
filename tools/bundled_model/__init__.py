"""The bundled model: a grammar of small chats, and the scripts that train and examine a model on what it writes."""
