// Large pages for large buffers.
#pragma once
#include "../../base.h"

namespace pyparallel::host {

// Asks the system for pages of 2 MiB wherever a whole one lies in these bytes, if they are 4 MiB or
// more. Writing to several buffers at once then misses the TLB less often, and the first touch is
// one fault a page: to be called before it. Contents stay as they are. Does nothing where the
// system has no such pages.
void advise_huge_pages(void* begin, u64 bytes);

}  // namespace pyparallel::host
