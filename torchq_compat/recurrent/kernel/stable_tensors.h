// Tensors through torch's stable ABI: checks, new tensors, and whether one is still the tensor it was.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cell_loop.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// `kOperators`: what the file that includes this calls its operators in errors.
[[noreturn]] inline void refuse(const std::string& what) {
  throw std::runtime_error(std::string(kOperators) + ": " + what);
}

// `what` is evaluated only if the check fails.
#define check(holds, what)      \
  do {                          \
    if (!(holds)) refuse(what); \
  } while (false)

inline void check_call_of_torch(AOTITorchError error) {
  check(error == AOTI_TORCH_SUCCESS, "an operator of torch failed");
}

// Calls an operator of torch, and returns its one result.
template <typename Result = Tensor, typename... Arguments>
Result call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  check_call_of_torch(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Result>(stack[0]);
}

// Makes a new tensor. torch's own operators for it are looked up by name, which takes longer.
inline Tensor empty(const torch::headeronly::IntHeaderOnlyArrayRef& sizes, ScalarType dtype) {
  std::array<int64_t, 3> strides{};
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
  const int32_t code = dtype == ScalarType::Float  ? aoti_torch_dtype_float32()
                       : dtype == ScalarType::Char ? aoti_torch_dtype_int8()
                                                   : aoti_torch_dtype_uint8();
  AtenTensorHandle made = nullptr;
  check_call_of_torch(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                               code, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// A sample of a tensor's numbers: a program loaded in the place of another one has its weights at the same
// addresses, in storages that do not own them.
inline uint64_t sample_of(const Tensor& tensor) {
  if (!tensor.is_contiguous()) return 0;
  return torchq_compat_sample(tensor.const_data_ptr(), tensor.numel() * tensor.element_size());
}

// What identifies a tensor: the address and count of its numbers, and a sample of them. Where the sample is not all
// numbers, how often they were written in place, too.
struct Key {
  const void* data;
  int64_t count;
  bool counts_versions;
  int64_t version;
  uint64_t sample;

  static int64_t version_of(const Tensor& tensor) {
    return call<int64_t>("aten::_version", "", tensor);
  }
  static Key of(const Tensor& tensor) {
    const bool is_whole = tensor.is_contiguous() && tensor.numel() * tensor.element_size() <= TORCHQ_COMPAT_WHOLE_SAMPLE;
    // Inference tensors count no versions.
    const bool counts = !is_whole && !call<bool>("aten::is_inference", "", tensor);
    return {tensor.const_data_ptr(), tensor.numel(), counts, counts ? version_of(tensor) : 0, sample_of(tensor)};
  }
  bool fits(const Tensor& tensor, bool asks_version) const {
    return tensor.const_data_ptr() == data && tensor.numel() == count &&
           (!asks_version ||
            ((!counts_versions || version_of(tensor) == version) && sample_of(tensor) == sample));
  }
};

}  // namespace
