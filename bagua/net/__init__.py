"""Who reaches whom: rendezvous, authenticated connections, and whether a peer is alive. The core moves the bytes."""
