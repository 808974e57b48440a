// The exceptions of the core: every message is built from values.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace pyparallel {

// Something went wrong while running (RuntimeError in Python).
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A caller's mistake, found before anything was launched (ValueError in Python).
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace pyparallel

#define PP_CHECK(condition, ...)                                                     \
  do {                                                                               \
    if (!(condition)) throw ::pyparallel::Error(::pyparallel::message(__VA_ARGS__)); \
  } while (0)

#define PP_CHECK_ARG(condition, ...)                                                         \
  do {                                                                                       \
    if (!(condition)) throw ::pyparallel::ArgumentError(::pyparallel::message(__VA_ARGS__)); \
  } while (0)
