"""Generation engines behind one protocol: the embedded torch engine and the start-up probe."""
