// A small test runner: TEST(name) { ... EXPECT(condition, values...); } and TEST_MAIN() once in
// each file. A failed EXPECT prints its values and ends the program: later checks would only repeat
// it.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"

namespace pyparallel::testing {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const char* condition,
                              const std::string& values) {
  std::printf("%s:%d: %s is false: %s\n", file, line, condition, values.c_str());
  std::fflush(stdout);
  std::_Exit(1);  // other threads may be in the middle of something
}

// memcmp() that takes the null pointers of empty vectors.
inline bool same_bytes(const void* a, const void* b, size_t bytes) {
  return bytes == 0 || std::memcmp(a, b, bytes) == 0;
}

// What an exception of type E says that `call` raises.
template <class E, class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was raised";
}

}  // namespace pyparallel::testing

#define TEST(name)                                                                   \
  static void name();                                                                \
  static const ::pyparallel::testing::Registration name##_registration(#name, name); \
  static void name()

#define EXPECT(condition, ...)                                                           \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      ::pyparallel::testing::fail(__FILE__, __LINE__, #condition,                        \
                                  ::pyparallel::message("" __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                                    \
  } while (0)

#define EXPECT_TEXT(got, want)                                        \
  do {                                                                \
    const std::string pp_got = (got), pp_want = (want);               \
    EXPECT(pp_got == pp_want, "'", pp_got, "', not '", pp_want, "'"); \
  } while (0)

#define TEST_MAIN()                                           \
  int main() {                                                \
    for (const auto& test : ::pyparallel::testing::tests()) { \
      test.run();                                             \
      std::printf("passed %s\n", test.name);                  \
    }                                                         \
  }
