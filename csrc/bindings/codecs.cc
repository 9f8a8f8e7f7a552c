// Codecs on raw memory; bagua/codecs adds shapes, checks and tensors.
#include "csrc/bindings/bindings.h"
#include "csrc/bindings/convert.h"
#include "csrc/codecs/codec.h"
#include "csrc/collectives/arguments.h"
#include "csrc/collectives/collectives.h"
#include "csrc/common/operation.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace bagua {
namespace {

// The memory of a codec's call: the values, and the message of their codes.
void require_both(const Codec& codec, uintptr_t values, DType dtype, size_t numel, uintptr_t bytes, DType wire) {
  collectives::require_memory(codec.name(), {"tensor", pointer(values), numel, item_bytes(dtype)});
  collectives::require_memory(codec.name(), {"message", pointer(bytes), codec.wire_bytes(numel, wire), 1});
}

uint8_t* byte_pointer(uintptr_t address) { return static_cast<uint8_t*>(pointer(address)); }

}  // namespace

void bind_codecs(py::module_& m) {
  name_codecs_by(&codec_spec);  // for error messages
  m.def("registered_codecs", &registered_codecs);
  m.def("derive_key", &derive_key, py::arg("key"), py::arg("index"), "A key that depends on both; see rng.h.");
  m.def("codec_block_numel", [](const std::string& name) { return get_codec(name).block_numel(); });
  m.def(
      "owned_stripe",
      [](size_t numel, int size, int rank, const std::string& codec) {
        const auto stripe = collectives::owned_stripe(numel, size, rank, get_codec(codec));
        return std::pair(stripe.begin, stripe.numel);
      },
      py::arg("numel"), py::arg("size"), py::arg("rank"), py::arg("codec"),
      "(begin, numel) of what a rank reduces in a compressed all_reduce.");
  m.def("codec_wire_bytes", [](const std::string& name, size_t numel, int dtype) {
    return get_codec(name).wire_bytes(numel, dtype_from(dtype));
  });
  m.def(
      "codec_encode",
      [](const std::string& name, uintptr_t source, int dtype, size_t numel, uintptr_t bytes, uint64_t key,
         const StreamChoice& stream) {
        const Codec& codec = get_codec(name);
        const DType type = dtype_from(dtype);
        require_both(codec, source, type, numel, bytes, type);
        py::gil_scoped_release release;
        return codec.encode(pointer(source), type, numel, byte_pointer(bytes), {key, 0}, chosen(stream));
      },
      py::arg("codec"), py::arg("source"), py::arg("dtype"), py::arg("numel"), py::arg("bytes"), py::arg("key"),
      py::arg("stream") = py::none(),
      "Returns the number of blocks that held a NaN or an Inf; 0 on a device. `stream` is kind and index of a device, "
      "and the handle of a stream on which it is enqueued; None is the CPU, now. So it is with the next three.");
  m.def(
      "codec_decode",
      [](const std::string& name, uintptr_t bytes, int dtype, size_t numel, uintptr_t destination,
         const StreamChoice& stream) {
        const Codec& codec = get_codec(name);
        const DType type = dtype_from(dtype);
        require_both(codec, destination, type, numel, bytes, type);
        py::gil_scoped_release release;
        codec.decode(byte_pointer(bytes), type, numel, pointer(destination), chosen(stream));
      },
      py::arg("codec"), py::arg("bytes"), py::arg("dtype"), py::arg("numel"), py::arg("destination"),
      py::arg("stream") = py::none());
  m.def(
      "codec_decode_add",
      [](const std::string& name, uintptr_t bytes, int dtype, size_t numel, uintptr_t sum, const StreamChoice& stream) {
        const Codec& codec = get_codec(name);
        const DType type = dtype_from(dtype);
        require_both(codec, sum, DType::kF32, numel, bytes, type);
        py::gil_scoped_release release;
        codec.decode_add(byte_pointer(bytes), type, numel, static_cast<float*>(pointer(sum)), chosen(stream));
      },
      py::arg("codec"), py::arg("bytes"), py::arg("dtype"), py::arg("numel"), py::arg("sum"),
      py::arg("stream") = py::none());
  m.def(
      "codec_reduce_encode",
      [](const std::string& name, uintptr_t messages, int count, int dtype, size_t numel, double factor,
         uintptr_t bytes, uint64_t key, const StreamChoice& stream) {
        const Codec& codec = get_codec(name);
        const DType type = dtype_from(dtype);
        const size_t message_bytes = codec.wire_bytes(numel, type);
        collectives::require_memory(codec.name(),
                                    {"messages", pointer(messages), message_bytes * static_cast<size_t>(count), 1});
        collectives::require_memory(codec.name(), {"message", pointer(bytes), codec.wire_bytes(numel, DType::kF32), 1});
        py::gil_scoped_release release;
        return codec.reduce_encode({byte_pointer(messages), message_bytes, count}, type, factor, {}, numel,
                                   byte_pointer(bytes), {key, 0}, chosen(stream));
      },
      py::arg("codec"), py::arg("messages"), py::arg("count"), py::arg("dtype"), py::arg("numel"), py::arg("factor"),
      py::arg("bytes"), py::arg("key"), py::arg("stream") = py::none(),
      "`count` messages in a row, of `numel` elements of `dtype` each.");
}

}  // namespace bagua
