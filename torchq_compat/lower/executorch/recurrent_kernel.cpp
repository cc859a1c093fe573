// torchq_compat_native::recurrent.out: all layers and directions of a converted recurrent module as one kernel
// of ExecuTorch's runtime. cell_loop.cpp has the computation; op.py documents the arguments. Here, x (steps,
// batch, width) and the states are floats, in tensors that ExecuTorch planned.
//
// Linked into a program, or loaded by it, the kernel registers itself. It packs a program's weights in its first
// call.

#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "cell_loop.h"

#ifndef TORCHQ_COMPAT_THREADS
#define TORCHQ_COMPAT_THREADS 1
#endif

namespace {

using executorch::aten::ArrayRef;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

constexpr int64_t kInstructionColumns = 11, kSlotColumns = 3, kQParams = 5, kConstants = 2 * kQParams + 2;
constexpr size_t kKept = 16;

struct CellDeleter {
  void operator()(const TorchqCompatCell* cell) const { torchq_compat_free_cell(cell); }
};

// The address of a tensor and a sample of its bytes: another program may be loaded at the same address.
struct Key {
  const void* data;
  uint64_t sample;

  static Key of(const Tensor& tensor) {
    const void* data = tensor.const_data_ptr();
    return {data, torchq_compat_sample(data, static_cast<int64_t>(tensor.nbytes()))};
  }
  bool operator==(const Key& other) const { return data == other.data && sample == other.sample; }
};

// Reads numbers one after the other; `fits` becomes false if there are too few.
struct Numbers {
  const double* next;
  int64_t left;
  bool fits = true;

  const double* take(int64_t count) {
    fits = fits && count >= 0 && count <= left;
    if (!fits) return nullptr;
    left -= count;
    next += count;
    return next - count;
  }
  int64_t integer() {
    const double* number = take(1);
    return number ? static_cast<int64_t>(*number) : 0;
  }
  std::vector<int64_t> integers(int64_t count) {
    const double* from = take(count);
    return from ? std::vector<int64_t>(from, from + count) : std::vector<int64_t>();
  }
};

struct Module {
  std::vector<Key> keys;
  std::vector<double> boundary;
  int64_t layers = 0, directions = 0, input_width = 0;
  std::vector<int64_t> state_widths, backward;
  std::vector<std::unique_ptr<const TorchqCompatCell, CellDeleter>> owned;
  std::vector<const TorchqCompatCell*> cells;
  std::list<std::vector<float>> floats;
  std::list<std::vector<int64_t>> integers;
};

template <typename To>
const void* copied(const Tensor& tensor, std::list<std::vector<To>>& into) {
  const auto copy = [&](const auto* from) { into.emplace_back(from, from + tensor.numel()); };
  switch (tensor.scalar_type()) {
    case ScalarType::Float: copy(tensor.const_data_ptr<float>()); break;
    case ScalarType::Double: copy(tensor.const_data_ptr<double>()); break;
    case ScalarType::Long: copy(tensor.const_data_ptr<int64_t>()); break;
    case ScalarType::Int: copy(tensor.const_data_ptr<int32_t>()); break;
    case ScalarType::Char: copy(tensor.const_data_ptr<int8_t>()); break;
    default: return nullptr;
  }
  return into.back().data();
}

bool read_cell(Numbers& numbers, const double* first_segments, int64_t first_count, int64_t states,
               ArrayRef<Tensor> weights, size_t& next, Module& module) {
  const bool is_first = static_cast<int64_t>(module.cells.size()) < module.directions;
  module.backward.push_back(numbers.integer());
  const int64_t instruction_count = numbers.integer(), slot_count = numbers.integer();
  const auto instructions = numbers.integers(instruction_count * kInstructionColumns);
  const auto slots = numbers.integers(slot_count * kSlotColumns);
  const auto results = numbers.integers(states);
  const double* constants = numbers.take(instruction_count * kConstants);
  const int64_t linears = numbers.integer();
  const auto masks = numbers.integers(linears);
  const int64_t own_count = numbers.integer();
  const double* own_segments = numbers.take(own_count * (1 + kQParams));
  if (!numbers.fits || slot_count <= states) return false;
  if (module.cells.empty()) {
    module.input_width = slots[0];
    for (int64_t s = 0; s < states; ++s) module.state_widths.push_back(slots[(1 + s) * kSlotColumns]);
  }
  std::vector<const void*> pointers;
  std::vector<int64_t> inputs;
  for (const int64_t mask : masks) {
    for (int64_t part = -1; part < 3; ++part) {
      if (part >= 0 && !(mask >> part & 1)) {
        pointers.push_back(nullptr);
        continue;
      }
      if (next >= weights.size()) return false;
      const Tensor& tensor = weights[next++];
      if (part < 0) {
        if (tensor.scalar_type() != ScalarType::Char || tensor.dim() != 2) return false;
        inputs.push_back(tensor.size(1));
        pointers.push_back(tensor.const_data_ptr());
      } else {
        pointers.push_back(part == 1 ? copied(tensor, module.integers) : copied(tensor, module.floats));
        if (pointers.back() == nullptr) return false;
      }
    }
  }
  module.owned.emplace_back(torchq_compat_prepare_cell(
      instructions.data(), constants, instruction_count, slots.data(), slot_count, results.data(), states,
      pointers.data(), inputs.data(), linears, is_first ? first_segments : own_segments,
      is_first ? first_count : own_count, 0));
  module.cells.push_back(module.owned.back().get());
  return module.cells.back() != nullptr;
}

std::shared_ptr<Module> prepared(const Tensor& program, ArrayRef<Tensor> weights, ArrayRef<double> boundary) {
  auto module = std::make_shared<Module>();
  module->boundary.assign(boundary.begin(), boundary.end());
  if (program.scalar_type() != ScalarType::Double) return nullptr;
  Numbers numbers{program.const_data_ptr<double>(), program.numel()};
  Numbers around{boundary.data(), static_cast<int64_t>(boundary.size())};
  module->layers = numbers.integer();
  module->directions = numbers.integer();
  const int64_t states = numbers.integer(), count = around.integer();
  const double* segments = around.take(count * (1 + kQParams));
  // Inputs and results are floats: no qparams follow the columns of x.
  for (int64_t left = 1 + 2 * states; left > 0; --left) around.fits = around.fits && around.integer() == 0;
  if (!around.fits || around.left != 0 || module->layers < 1 || module->directions < 1) return nullptr;
  size_t next = 0;
  for (int64_t cell = 0; cell < module->layers * module->directions; ++cell) {
    if (!read_cell(numbers, segments, count, states, weights, next, *module)) return nullptr;
  }
  return numbers.left == 0 && next == weights.size() ? module : nullptr;
}

std::shared_ptr<Module> found(const Tensor& program, ArrayRef<Tensor> weights, ArrayRef<double> boundary) {
  static std::mutex mutex;
  static auto& kept = *new std::list<std::shared_ptr<Module>>;
  std::vector<Key> keys{Key::of(program)};
  for (const Tensor& weight : weights) keys.push_back(Key::of(weight));
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto each = kept.begin(); each != kept.end(); ++each) {
    const Module& module = **each;
    if (module.keys == keys && module.boundary.size() == boundary.size() &&
        std::equal(boundary.begin(), boundary.end(), module.boundary.begin())) {
      kept.splice(kept.begin(), kept, each);
      return kept.front();
    }
  }
  auto module = prepared(program, weights, boundary);
  if (module == nullptr) return nullptr;
  module->keys = std::move(keys);
  kept.push_front(module);
  if (kept.size() > kKept) kept.pop_back();
  return module;
}

Error run(const Tensor& x, ArrayRef<Tensor> states, ArrayRef<Tensor> weights, const Tensor& program,
          ArrayRef<double> boundary, ArrayRef<int64_t> batch_sizes, bool batch_first, int64_t work_per_thread,
          ArrayRef<Tensor> out) {
  const bool is_packed = !batch_sizes.empty() && !(batch_sizes.size() == 1 && batch_sizes[0] == 0);
  const auto module = found(program, weights, boundary);
  if (module == nullptr || is_packed || x.scalar_type() != ScalarType::Float) return Error::InvalidArgument;
  const bool is_cell = x.dim() == 2;
  if (batch_first || (x.dim() != 3 && !is_cell)) return Error::InvalidArgument;
  if (x.size(x.dim() - 1) != module->input_width || states.size() != module->state_widths.size() ||
      out.size() != states.size() + !is_cell)
    return Error::InvalidArgument;
  const int64_t steps = is_cell ? 1 : x.size(0);
  const int64_t batch = is_cell ? x.size(0) : x.size(1);
  const int64_t width = module->directions * module->state_widths[0];
  const int64_t cells = static_cast<int64_t>(module->cells.size());
  std::vector<float*> pointers(cells * states.size());
  for (size_t s = 0; s < states.size(); ++s) {
    const Tensor& state = states[s];
    Tensor last = out[s + !is_cell];
    if (state.scalar_type() != ScalarType::Float ||
        state.numel() != cells * batch * module->state_widths[s])
      return Error::InvalidArgument;
    const Error resized = executorch::runtime::resize_tensor(last, state.sizes());
    if (resized != Error::Ok) return resized;
    float* to = last.mutable_data_ptr<float>();
    std::copy_n(state.const_data_ptr<float>(), state.numel(), to);
    for (int64_t cell = 0; cell < cells; ++cell)
      pointers[cell * states.size() + s] = to + cell * batch * module->state_widths[s];
  }
  float* output = pointers[0];
  if (!is_cell) {
    const SizesType sizes[3] = {static_cast<SizesType>(steps), static_cast<SizesType>(batch),
                                static_cast<SizesType>(width)};
    Tensor result = out[0];
    const Error resized = executorch::runtime::resize_tensor(result, ArrayRef<SizesType>(sizes, 3));
    if (resized != Error::Ok) return resized;
    output = result.mutable_data_ptr<float>();
  }
  const int64_t problem = torchq_compat_run_layers(
      module->cells.data(), module->backward.data(), module->layers, module->directions, steps, batch, nullptr,
      x.const_data_ptr<float>(), pointers.data(), output, TORCHQ_COMPAT_THREADS, work_per_thread);
  if (problem != 0) return Error::MemoryAllocationFailed;
  return Error::Ok;
}

void recurrent_out(KernelRuntimeContext& context, Span<EValue*> stack) {
  const Error error =
      run(stack[0]->toTensor(), stack[1]->toTensorList(), stack[2]->toTensorList(), stack[3]->toTensor(),
          stack[4]->toDoubleList(), stack[5]->toIntList(), stack[7]->toBool(), stack[10]->toInt(),
          stack[11]->toTensorList());
  if (error != Error::Ok) context.fail(error);
}

const Kernel kKernel("torchq_compat_native::recurrent.out", recurrent_out);
[[maybe_unused]] const Error kRegistered = executorch::runtime::register_kernels({&kKernel, 1});

}  // namespace
