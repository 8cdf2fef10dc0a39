// Threads that share the items of one call. A call is over when every item is done, not when every
// thread has come: one that the machine runs something else on is not waited for, unless it is
// within an item.

#pragma once

#include <cstdint>

typedef void (*Items)(const void* call, int64_t first, int64_t stop);

// Calls items(call, first, stop) for runs that cover 0 .. count once each; `each` is what an item
// costs, about in numbers read. Returns when all are done.
void share(int64_t count, int64_t each, Items items, const void* call);

// body(item) for every item of 0 .. count, in any order and by any thread.
template <typename Body>
static void parallel(int64_t count, int64_t each, const Body& body) {
  Items items = [](const void* call, int64_t first, int64_t stop) {
    const Body& body = *static_cast<const Body*>(call);
    for (int64_t item = first; item < stop; item++) body(item);
  };
  share(count, each, items, &body);
}
