"""The network between ranks: rendezvous, authenticated connections, liveness of peers. The core moves the bytes."""
