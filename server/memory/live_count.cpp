// Counts the live buffers of the MLX in this process, on any backend whose allocations go through the virtual
// interface of mlx/allocator.h (Itanium C++ ABI).
//
// The allocator object gets a copy of its own table of virtual functions in which malloc, free, make_buffer and
// release are replaced by ones that count and forward. No file of MLX changes. Buffers made before the installation
// are not known, so install before the model loads. server/native.py builds and loads this and proves the count.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "mlx/allocator.h"

using mlx::core::allocator::Allocator;
using mlx::core::allocator::Buffer;

namespace {

using Malloc = Buffer (*)(Allocator*, size_t);
using Free = void (*)(Allocator*, Buffer);
using Size = size_t (*)(const Allocator*, Buffer);
using MakeBuffer = Buffer (*)(Allocator*, void*, size_t);

constexpr int kBefore = 2;  // offset to top and type information stand before the first slot
constexpr int kSlots = 16;  // more than the interface has; the rest is copied and never called

// A pointer to a virtual member function holds the function's place in the table, so the places are those of the
// header that this was built with.
template <typename Member>
int slot_of(Member member) {
  std::ptrdiff_t word;
  std::memcpy(&word, &member, sizeof(word));
#if defined(__aarch64__) || defined(__arm__)
  return static_cast<int>(word / sizeof(void*));  // the mark of a virtual function is in the second word
#else
  return static_cast<int>((word - 1) / sizeof(void*));
#endif
}

const int kMalloc = slot_of(&Allocator::malloc);
const int kFree = slot_of(&Allocator::free);
const int kSize = slot_of(&Allocator::size);
const int kMakeBuffer = slot_of(&Allocator::make_buffer);
const int kRelease = slot_of(&Allocator::release);

void* table[kBefore + kSlots];
void** original = nullptr;
Allocator* target = nullptr;
std::atomic<int64_t> live{0};

template <typename Function>
Function forward_to(int slot) {
  return reinterpret_cast<Function>(original[slot]);
}

// Buffers of no bytes are not counted: Metal keeps none.
void made(Buffer buffer, size_t size) {
  if (buffer.ptr() != nullptr && size != 0) live.fetch_add(1, std::memory_order_relaxed);
}

void gone(Allocator* self, Buffer buffer) {
  if (buffer.ptr() != nullptr && forward_to<Size>(kSize)(self, buffer) != 0) {
    live.fetch_sub(1, std::memory_order_relaxed);
  }
}

Buffer counted_malloc(Allocator* self, size_t size) {
  Buffer buffer = forward_to<Malloc>(kMalloc)(self, size);
  made(buffer, size);
  return buffer;
}

void counted_free(Allocator* self, Buffer buffer) {
  gone(self, buffer);
  forward_to<Free>(kFree)(self, buffer);
}

Buffer counted_make_buffer(Allocator* self, void* data, size_t size) {
  Buffer buffer = forward_to<MakeBuffer>(kMakeBuffer)(self, data, size);
  made(buffer, size);
  return buffer;
}

void counted_release(Allocator* self, Buffer buffer) {
  gone(self, buffer);
  forward_to<Free>(kRelease)(self, buffer);
}

bool fits(int slot) { return slot >= 0 && slot < kSlots - 2; }

}  // namespace

extern "C" {

// 0: counting from now on; 1: already counting; 2: the interface isn't one that this understands.
int live_install(void* allocator) {
  if (target != nullptr) return 1;
  for (int slot : {kMalloc, kFree, kSize, kMakeBuffer, kRelease}) {
    if (!fits(slot)) return 2;
  }
  target = static_cast<Allocator*>(allocator);
  original = *reinterpret_cast<void***>(target);
  std::memcpy(table, original - kBefore, sizeof(table));
  void** mine = table + kBefore;
  mine[kMalloc] = reinterpret_cast<void*>(&counted_malloc);
  mine[kFree] = reinterpret_cast<void*>(&counted_free);
  mine[kMakeBuffer] = reinterpret_cast<void*>(&counted_make_buffer);
  mine[kRelease] = reinterpret_cast<void*>(&counted_release);
  live.store(0);
  *reinterpret_cast<void***>(target) = mine;
  return 0;
}

void live_uninstall() {
  if (target == nullptr) return;
  *reinterpret_cast<void***>(target) = original;
  target = nullptr;
}

int64_t live_count() { return live.load(std::memory_order_relaxed); }
}
