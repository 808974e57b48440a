#include "huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pyparallel::host {

void advise_huge_pages([[maybe_unused]] void* begin, [[maybe_unused]] u64 bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr u64 kPage = 2 << 20;
  if (bytes < 2 * kPage) return;
  const auto start = reinterpret_cast<std::uintptr_t>(begin);
  const u64 first = round_up(start, kPage), last = (start + bytes) / kPage * kPage;
  // Fails where the system has been built without such pages, which is as well.
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace pyparallel::host
