// Memory for packed weights, carved out of large chunks that the kernel may back with 2 MiB
// pages: weights are streamed through once per step, and with 4 KiB pages the address
// translation takes a third of the bandwidth away.
#include "weight_memory.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <memory>
#include <mutex>

namespace diptych {
namespace {

constexpr size_t kPage = size_t(2) << 20;
constexpr size_t kChunk = 16 * kPage;
constexpr size_t kAlign = 256;

struct Chunk {
  char* base = nullptr;
  size_t size = 0, used = 0;

  explicit Chunk(size_t bytes) : size(bytes) {
    void* p = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "diptych: no memory for ", bytes, " bytes of weights");
    char* start = static_cast<char*>(p);
    base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(start) + kPage - 1) / kPage * kPage);
    // What the alignment left over goes back at once.
    if (base > start) munmap(start, size_t(base - start));
    size_t behind = size_t(start + size + kPage - (base + size));
    if (behind) munmap(base + size, behind);
    madvise(base, size, MADV_HUGEPAGE);  // only advice: without huge pages it is slower
  }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;
  ~Chunk() { munmap(base, size); }
};

std::mutex g_mutex;
std::weak_ptr<Chunk> g_open;  // the tensors own their chunk

}  // namespace

at::Tensor weight_bytes(int64_t count) {
  size_t bytes = (size_t(count) + kAlign - 1) / kAlign * kAlign;
  std::lock_guard<std::mutex> lock(g_mutex);
  std::shared_ptr<Chunk> chunk = g_open.lock();
  if (!chunk || chunk->size - chunk->used < bytes) {
    size_t size = bytes > kChunk ? (bytes + kPage - 1) / kPage * kPage : kChunk;
    chunk = std::make_shared<Chunk>(size);
    g_open = chunk;
  }
  char* at = chunk->base + chunk->used;
  chunk->used += bytes;
  return at::from_blob(at, {count}, [chunk](void*) {}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace diptych
