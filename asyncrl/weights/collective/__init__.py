"""The `collective` carrier: a process group with every engine, in which a process of its own broadcasts the weights."""
