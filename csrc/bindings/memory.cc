// Memory that the ranks of this host share, as a Python buffer, and what is done to memory outside any operation.
#include <string>
#include <vector>

#include <fcntl.h>
#include <pybind11/stl.h>

#include "csrc/bindings/bindings.h"
#include "csrc/bindings/convert.h"
#include "csrc/collectives/arguments.h"
#include "csrc/common/doorbell.h"
#include "csrc/common/shared_segments.h"
#include "csrc/kernels/copy_to_cold.h"
#include "csrc/kernels/digest.h"
#include "csrc/kernels/nonfinite.h"

namespace py = pybind11;

namespace bagua {
namespace {

// Owns one segment of the registry; freed when the last view of it is destroyed.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes) : bytes_(bytes), data_(SegmentRegistry::instance().create(bytes)) {}
  ~SharedMemory() {
    if (generation_ == process_generation()) SegmentRegistry::instance().release(data_);  // else it is the parent's
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  size_t bytes() const { return bytes_; }
  void* data() const { return data_; }

 private:
  const uint32_t generation_ = process_generation();
  size_t bytes_;
  void* data_;
};

}  // namespace

void bind_memory(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory", py::buffer_protocol(),
                           "`bytes` zeroed bytes that peers of this host can map; a writable buffer.")
      .def(py::init<size_t>(), py::arg("bytes"))
      .def_buffer([](SharedMemory& memory) {
        return py::buffer_info(static_cast<uint8_t*>(memory.data()), static_cast<py::ssize_t>(memory.bytes()));
      });
  m.def(
      "create_sealed_memory",
      [](const std::string& name, size_t bytes) {
        return fcntl(create_sealed(name.c_str(), bytes).get(), F_DUPFD_CLOEXEC, 0);  // the caller's from here on
      },
      py::arg("name"), py::arg("bytes"), "Descriptor of memory that peers can map and not resize.");
  m.def(
      "expect_sealed_memory", &expect_sealed, py::arg("fd"), py::arg("bytes"),
      "Raises TransportError unless a descriptor that a peer has passed is of so many bytes that it cannot take away.");
  m.attr("DOORBELL_BYTES") = kDoorbellBytes;
  m.def(
      "copy_to_cold",
      [](uintptr_t destination, uintptr_t source, size_t bytes) {
        collectives::require_memory("copy_to_cold", {"destination", pointer(destination), bytes, 1});
        collectives::require_memory("copy_to_cold", {"source", pointer(source), bytes, 1});
        py::gil_scoped_release release;
        kernels::copy_to_cold(pointer(destination), pointer(source), bytes, Stream{});
      },
      py::arg("destination"), py::arg("source"), py::arg("bytes"));
  m.def(
      "all_finite",
      [](uintptr_t address, size_t numel, int dtype, size_t stride) {
        py::gil_scoped_release release;
        return kernels::count_nonfinite(dtype_from(dtype), pointer(address), numel, stride) == 0;
      },
      py::arg("address"), py::arg("numel"), py::arg("dtype"), py::arg("stride"),
      "Whether a tensor of the CPU holds no NaN and no infinity; of `stride` elements one is looked at.");
  m.def(
      "digest",
      [](const std::vector<uintptr_t>& addresses, const std::vector<size_t>& sizes, uintptr_t digests,
         const StreamChoice& stream) {
        std::vector<kernels::DigestPiece> pieces;
        pieces.reserve(addresses.size());
        for (size_t i = 0; i < addresses.size(); ++i) {
          collectives::require_memory("digest", {"a tensor", pointer(addresses[i]), sizes.at(i), 1});
          pieces.push_back({pointer(addresses[i]), sizes[i]});
        }
        collectives::require_memory("digest", {"digests", pointer(digests), pieces.size(), sizeof(uint64_t)});
        py::gil_scoped_release release;
        kernels::digest(pieces.data(), static_cast<int>(pieces.size()), static_cast<uint64_t*>(pointer(digests)),
                        chosen(stream));
      },
      py::arg("addresses"), py::arg("sizes"), py::arg("digests"), py::arg("stream"),
      "Adds the digest of each tensor's bytes to its 64-bit number of `digests`; on a device it is enqueued on "
      "`stream`.");
  m.def("is_shared", [](uintptr_t address, size_t bytes) {
    return SegmentRegistry::instance().find(pointer(address), bytes).has_value();
  });
}

}  // namespace bagua
