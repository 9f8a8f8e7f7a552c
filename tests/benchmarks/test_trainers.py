"""The count of sent bytes in benchmarks/training/trainers.py."""

import socket

from benchmarks.training import trainers


def test_bytes_are_those_that_the_peer_has_received():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other = server.accept()[0]
        with other:
            before = trainers._sent_bytes()
            one.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(other.recv(1 << 16))
            other.sendall(bytes(234))
            one.recv(1000)
            one.sendall(bytes(1))  # acknowledges these, as they have acknowledged the others
            other.recv(1)
            assert 100_234 <= trainers._sent_bytes() - before <= 100_235
