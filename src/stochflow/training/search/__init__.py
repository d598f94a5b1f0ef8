"""Search inside the training: sources that wrap a source and add objects worth learning from. They change the data, never the target."""
