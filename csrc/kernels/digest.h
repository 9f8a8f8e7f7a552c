// Contract of the digest of many pieces of memory: 64 bits of each, by which ranks find out whether they hold the same.
//
// A piece is cut into blocks of 1 KB, the last one filled up with zeros. With w the 256 words of 32 bits of block b,
// little-endian, and the functions of arithmetic/digest.h, sums modulo 2^64 and for the words modulo 2^32:
//
//   products = sum over j < 128 of (w[j] ^ key(j)) (w[j + 128] ^ key(j + 128))
//   digest   = of_size(num_bytes) + sum over b of of_block(b, products, sum of all w)
//
// It depends on every bit, its position and the size, and on nothing else: not on alignment, threads, instruction set
// or device. Two different pieces have the same with a probability of about 2^-64; of 2^-32 where they differ in the
// order of words of one block only (NH, of UMAC: Black, Halevi, Krawczyk, Krovetz, Rogaway 1999). It is no signature:
// collisions can be made on purpose. Any sizes and alignments, 0 included. No allocation, no synchronisation; on a
// device one launch per kDigestMaxPieces.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/common/device.h"

namespace bagua::kernels {

inline constexpr size_t kDigestBlockBytes = 1024;
// A launch takes so many pieces: its parameters fit into the 4 KB that every GPU has room for.
inline constexpr int kDigestMaxPieces = 128;

struct DigestPiece {
  const void* data;
  size_t num_bytes;
};

// Adds to digests[i], which lie where the stream runs, the digest of pieces[i].
void digest(const DigestPiece* pieces, int num_pieces, uint64_t* digests, Stream stream);

}  // namespace bagua::kernels
