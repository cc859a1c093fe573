// torchq_compat_native::recurrent: all layers and directions of a converted recurrent module as one operator,
// through torch's stable ABI. cell_loop.cpp has the computation; op.py describes the arguments.
//
// Weights are plain tensors. The operator caches prepared cells by their owner and by the storage and version
// of every tensor; a cached cell holds the storages, so that no other tensor gets their addresses.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "cell_loop.h"

constexpr const char* kOperators = "torchq_compat_native::recurrent";
#include "stable_tensors.h"

namespace {

using Tensors = std::vector<Tensor>;

// Columns of the tables; see instruction_set.py.
constexpr int64_t kInstructionColumns = 11, kRegisterColumns = 3, kQParams = 5, kConstants = 2 * kQParams + 2;
constexpr int64_t kLinear = 0, kOperations = 8;
// The product of two integers of a program fits in 64 bits.
constexpr double kMostInteger = 1ll << 31;
// The most prepared modules kept for one owner, and for all calls without an owner.
constexpr size_t kKeptOfOwner = 4, kKeptOfNobody = 16;
// Stands for an owner: weights are packed for this call alone, one after the other.
constexpr int64_t kOwnerOfOneCall = -1;
// The most bound calls of an owner: one for each place that calls it with other qparams.
constexpr size_t kBoundOfOwner = 4096;

// Reads numbers one after another.
class Numbers {
 public:
  Numbers(const double* numbers, int64_t count, std::string name)
      : numbers_(numbers), count_(count), name_(std::move(name)) {}

  const double* take(int64_t count) {
    check(count >= 0 && count <= count_ - at_, name_ + " ends early");
    at_ += count;
    return numbers_ + at_ - count;
  }
  int64_t integer() { return integers(1)[0]; }
  // Reads a number of rows, and checks that so many rows of `columns` numbers each follow.
  int64_t rows(int64_t columns) {
    const int64_t count = integer();
    check(count >= 0 && count <= (count_ - at_) / columns, name_ + " ends early");
    return count;
  }
  std::vector<int64_t> integers(int64_t count) {
    const double* from = take(count);
    const auto is_small = [](double number) { return number > -kMostInteger && number < kMostInteger; };
    check(std::all_of(from, from + count, is_small), name_ + " has a number that is no integer");
    return {from, from + count};
  }
  bool at_end() const { return at_ == count_; }

 private:
  const double* const numbers_;
  const int64_t count_;
  const std::string name_;
  int64_t at_ = 0;
};

struct CellDeleter {
  void operator()(const TorchqCompatCell* cell) const { torchq_compat_free_cell(cell); }
};
using Cell = std::unique_ptr<const TorchqCompatCell, CellDeleter>;
using QParams = std::array<double, kQParams>;

QParams qparams_of(const double* numbers) {
  QParams qparams;
  std::copy_n(numbers, kQParams, qparams.begin());
  return qparams;
}

bool is_signed(const QParams& qparams) { return qparams[2] < 0; }
ScalarType integers_on(const QParams& qparams) {
  return is_signed(qparams) ? ScalarType::Char : ScalarType::Byte;
}

// A segment of x: its columns, and their qparams.
struct Columns {
  int64_t width;
  QParams qparams;
};

// A module: its cells and its boundary.
struct Module {
  std::vector<Key> keys;  // of the program and the weights
  std::vector<double> boundary;
  int64_t version = -1;     // given by the caller
  bool packs_late = false;  // for one call
  Tensors held;          // weights as the cells read them, and the storages behind the keys
  std::vector<Cell> owned;
  std::vector<const TorchqCompatCell*> cells;
  std::vector<int64_t> backward;
  int64_t layers = 0, directions = 0, input_width = 0;
  std::vector<int64_t> state_widths;
  std::vector<Columns> columns;                      // of x
  std::vector<std::vector<QParams>> state_qparams;   // of given states: none, one for all rows, or one each
  std::vector<std::vector<QParams>> result_qparams;  // of results: none for floats, or one for integers

  bool has_weights_of(const Module& other) const {
    const auto is_same = [](const Key& one, const Key& another) {
      return one.data == another.data && one.count == another.count;
    };
    return version == other.version && std::equal(keys.begin(), keys.end(), other.keys.begin(),
                                                  other.keys.end(), is_same);
  }

  // If the caller counts versions itself, the versions of the tensors are not checked.
  bool fits(const Tensors& weights, const Tensor& program, const std::vector<double>& around,
            int64_t told) const {
    const bool asks = told < 0;
    if (told != version || keys.size() != weights.size() + 1 || !keys[0].fits(program, asks)) return false;
    if (around.size() != boundary.size() || !std::equal(around.begin(), around.end(), boundary.begin())) {
      return false;
    }
    for (size_t w = 0; w < weights.size(); ++w) {
      if (!keys[1 + w].fits(weights[w], asks)) return false;
    }
    return true;
  }
};

class Reader {
 public:
  Reader(Module& module, const Tensors& weights) : module_(module), weights_(weights) {}

  void read(const Tensor& program) {
    check(program.is_cpu() && program.scalar_type() == ScalarType::Double && program.dim() == 1 &&
              program.is_contiguous(),
          "program must be a vector of torch.float64 on the CPU");
    Numbers numbers(static_cast<const double*>(program.const_data_ptr()), program.numel(), "program"),
        around(module_.boundary.data(), static_cast<int64_t>(module_.boundary.size()), "boundary");
    module_.layers = numbers.integer();
    module_.directions = numbers.integer();
    const int64_t states = numbers.integer();
    check(module_.layers > 0 && module_.directions > 0 && states > 0, "program has no cells");
    read_boundary(around, states);
    for (int64_t cell = 0; cell < module_.layers * module_.directions; ++cell) {
      read_cell(numbers, cell / module_.directions == 0, states);
    }
    check(numbers.at_end() && around.at_end() && next_ == weights_.size(),
          "program, boundary and weights differ");
  }

 private:
  void read_boundary(Numbers& numbers, int64_t states) {
    segments_ = numbers.rows(1 + kQParams);
    first_segments_ = numbers.take(segments_ * (1 + kQParams));
    for (int64_t s = 0; s < segments_; ++s) {
      const double* segment = first_segments_ + s * (1 + kQParams);
      module_.columns.push_back({static_cast<int64_t>(segment[0]), qparams_of(segment + 1)});
    }
    const auto read_into = [&](std::vector<std::vector<QParams>>& all, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        all.emplace_back();
        for (int64_t left = numbers.rows(kQParams); left > 0; --left)
          all.back().push_back(qparams_of(numbers.take(kQParams)));
      }
    };
    read_into(module_.state_qparams, states);
    read_into(module_.result_qparams, 1 + states);
    for (const auto& rows : module_.state_qparams) {
      const int64_t count = static_cast<int64_t>(rows.size());
      check(count < 2 || count == module_.layers * module_.directions, "qparams of states, one for each row");
    }
    for (const auto& one : module_.result_qparams) check(one.size() < 2, "a result has one scale");
  }

  void read_cell(Numbers& numbers, bool is_first, int64_t states) {
    module_.backward.push_back(numbers.integer());
    const int64_t instruction_count = numbers.rows(kInstructionColumns),
                  register_count = numbers.rows(kRegisterColumns);
    check(register_count > states, "a cell has too few registers");
    const std::vector<int64_t> instructions = numbers.integers(instruction_count * kInstructionColumns),
                               registers = numbers.integers(register_count * kRegisterColumns),
                               results = numbers.integers(states);
    const double* constants = numbers.take(instruction_count * kConstants);
    const int64_t linears = numbers.rows(1);
    const std::vector<int64_t> masks = numbers.integers(linears);
    const int64_t own_segments = numbers.rows(1 + kQParams);
    const double* segments = numbers.take(own_segments * (1 + kQParams));
    if (is_first) segments = first_segments_;
    const int64_t segment_count = is_first ? segments_ : own_segments;
    check_registers(registers, register_count, results, states, is_first);
    std::vector<const void*> pointers;
    std::vector<int64_t> inputs, outputs;
    for (int64_t mask : masks) {
      inputs.push_back(0);
      outputs.push_back(0);
      read_weight(mask, pointers, inputs.back(), outputs.back());
    }
    check_instructions(instructions, registers, states, inputs, outputs, constants);
    double columns = 0;
    for (int64_t s = 0; s < segment_count; ++s) {
      check(segments[s * (1 + kQParams)] > 0, "a segment of x has no columns");
      columns += segments[s * (1 + kQParams)];
    }
    check(columns == static_cast<double>(registers[0]), "the segments of x are not its columns");
    Cell cell(torchq_compat_prepare_cell(instructions.data(), constants, instruction_count, registers.data(),
                                         register_count, results.data(), states, pointers.data(),
                                         inputs.data(), linears, segments, segment_count, module_.packs_late));
    check(cell != nullptr, "no memory for packed weights");
    module_.cells.push_back(cell.get());
    module_.owned.push_back(std::move(cell));
  }

  void check_registers(const std::vector<int64_t>& registers, int64_t register_count,
                       const std::vector<int64_t>& results, int64_t states, bool is_first) {
    for (int64_t s = 0; s < register_count; ++s) {
      const int64_t width = registers[s * kRegisterColumns], units = registers[s * kRegisterColumns + 1];
      check(width > 0 && units > 0 && width % units == 0, "a register has no width, or no whole gates");
    }
    for (int64_t s = 0; s < states; ++s) {
      const int64_t width = registers[(1 + s) * kRegisterColumns];
      if (static_cast<int64_t>(module_.state_widths.size()) <= s) module_.state_widths.push_back(width);
      check(width == module_.state_widths[s], "cells have states of other widths");
      const auto is_as_wide = [&](int64_t result) {
        return registers[result * kRegisterColumns] == width &&
               registers[result * kRegisterColumns + 1] == registers[(1 + s) * kRegisterColumns + 1];
      };
      check(results[s] > 0 && results[s] < register_count && is_as_wide(results[s]),
            "a new state has another width, or other gates");
      check(!registers[(1 + s) * kRegisterColumns + 2], "a state changes from step to step");
    }
    if (is_first && module_.cells.empty()) module_.input_width = registers[0];
    const int64_t expected = is_first ? module_.input_width : module_.directions * module_.state_widths[0];
    check(registers[0] == expected, "a layer reads another width than it gets");
  }

  void check_instructions(const std::vector<int64_t>& instructions, const std::vector<int64_t>& registers,
                          int64_t states, const std::vector<int64_t>& inputs,
                          const std::vector<int64_t>& outputs, const double* constants) {
    const int64_t count = static_cast<int64_t>(instructions.size()) / kInstructionColumns,
                  register_count = static_cast<int64_t>(registers.size()) / kRegisterColumns;
    // x and the states are written from the beginning.
    std::vector<bool> is_written(register_count, false);
    std::fill_n(is_written.begin(), 1 + states, true);
    const auto width_of = [&](int64_t which) { return registers[which * kRegisterColumns]; };
    const auto units_of = [&](int64_t which) { return registers[which * kRegisterColumns + 1]; };
    const auto once_of = [&](int64_t which) { return registers[which * kRegisterColumns + 2] != 0; };
    for (int64_t i = 0; i < count; ++i) {
      const int64_t* row = instructions.data() + i * kInstructionColumns;
      const int64_t op = row[0], target = row[1], width = row[6] * row[7], weight = row[8];
      check(op >= 0 && op < kOperations, "there is no such operation");
      check(target > 0 && target < register_count && !is_written[target], "a register is written twice");
      check(row[6] > 0 && row[6] <= width_of(target) && width == width_of(target) &&
                row[7] == units_of(target) && once_of(target) == (row[9] != 0),
            "a result has another width, or is computed as often as its register is not");
      for (int64_t operand = 0; operand < 2; ++operand) {
        const int64_t which = row[2 + 2 * operand], offset = row[3 + 2 * operand];
        if (operand == 1 && which == -1) continue;
        check(which >= 0 && which < register_count && offset >= 0 && is_written[which],
              "an operand is no register, or not written before");
        check(op == kLinear || offset <= width_of(which) - width, "an operand is too narrow");
        check(op == kLinear || (units_of(which) == row[7] && offset % row[7] == 0),
              "an operand has other gates than the result");
        check(!row[9] || which == 0 || once_of(which), "what is computed once reads what is not");
      }
      is_written[target] = true;
      if (op != kLinear) continue;
      check(row[9] || (row[2] != 0 && !once_of(row[2])), "a linear of x alone is computed once");
      check(weight >= 0 && weight < static_cast<int64_t>(inputs.size()), "a linear has no weight");
      check(inputs[weight] == width_of(row[2]) && row[3] == 0 && outputs[weight] == width,
            "a weight has another shape than its linear");
      check(constants != nullptr, "there are no constants");
      check(!row[9] || row[2] == 0 || constants[i * kConstants + kQParams] >= 0,
            "dynamic qparams are chosen of what is computed of x alone");
    }
  }

  // Reads the values of a weight; its scales, zero points and bias if bit 0, 1 and 2 of the mask are set.
  void read_weight(int64_t mask, std::vector<const void*>& pointers, int64_t& inputs, int64_t& outputs) {
    const Tensor& values = next();
    check(values.scalar_type() == ScalarType::Char && values.dim() == 2, "a weight must be an int8 matrix");
    outputs = values.size(0);
    inputs = values.size(1);
    pointers.push_back(held(values, ScalarType::Char));
    constexpr ScalarType kDtypes[3] = {ScalarType::Float, ScalarType::Long, ScalarType::Float};
    for (int64_t part = 0; part < 3; ++part) {
      const void* pointer = nullptr;
      if (mask >> part & 1) {
        const Tensor& tensor = next();
        check(tensor.numel() == outputs, "a weight has one scale, zero point and bias for each row");
        pointer = held(tensor, kDtypes[part]);
      }
      pointers.push_back(pointer);
    }
  }

  const Tensor& next() {
    check(next_ < weights_.size(), "there are too few weights");
    const Tensor& tensor = weights_[next_++];
    check(tensor.is_cpu(), "a weight is not on the CPU");
    return tensor;
  }

  const void* held(const Tensor& tensor, ScalarType dtype) {
    Tensor read = call("aten::detach", "", tensor);
    if (read.scalar_type() != dtype) read = torch::stable::to(read, dtype);
    if (!read.is_contiguous()) read = torch::stable::contiguous(read);
    module_.held.push_back(read);
    return read.const_data_ptr();
  }

  Module& module_;
  const Tensors& weights_;
  size_t next_ = 0;
  int64_t segments_ = 0;
  const double* first_segments_ = nullptr;
};

class Cache {
 public:
  static std::shared_ptr<Module> made(const Tensors& weights, const Tensor& program,
                                      const std::vector<double>& boundary, int64_t version,
                                      bool packs_late = false) {
    auto module = std::make_shared<Module>();
    module->version = version;
    module->packs_late = packs_late;
    // Keys are made before the tensors are read, so that a write in the meantime makes the keys outdated.
    const auto hold = [&](const Tensor& tensor) {
      module->keys.push_back(Key::of(tensor));
      module->held.push_back(call("aten::detach", "", tensor));
    };
    hold(program);
    for (const Tensor& tensor : weights) hold(tensor);
    module->boundary = boundary;
    Reader(*module, weights).read(program);
    return module;
  }

  std::shared_ptr<const Module> find(int64_t owner, const Tensors& weights, const Tensor& program,
                                     const std::vector<double>& boundary, int64_t version) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto of_owner = modules_.find(owner);
      if (of_owner != modules_.end()) {
        for (auto each = of_owner->second.begin(); each != of_owner->second.end(); ++each) {
          if (!(*each)->fits(weights, program, boundary, version)) continue;
          of_owner->second.splice(of_owner->second.begin(), of_owner->second, each);
          return of_owner->second.front();
        }
      }
    }
    return keep(owner, made(weights, program, boundary, version));
  }

  // Returns a number for a module, valid until its owner is forgotten, or binds another program or version or
  // other weights.
  int64_t bind(int64_t owner, const Tensors& weights, const Tensor& program,
               const std::vector<double>& boundary, int64_t version) {
    const std::shared_ptr<const Module> module = find(owner, weights, program, boundary, version);
    std::list<std::shared_ptr<const Module>> dropped;  // freed behind the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int64_t>& tickets = tickets_[owner];
    const auto is_of_before = [&](int64_t ticket) {
      const auto of_ticket = bound_.find(ticket);
      const bool is_current = of_ticket->second->has_weights_of(*module) && tickets.size() < kBoundOfOwner;
      if (is_current) return false;
      dropped.push_back(std::move(of_ticket->second));
      bound_.erase(of_ticket);
      return true;
    };
    tickets.erase(std::remove_if(tickets.begin(), tickets.end(), is_of_before), tickets.end());
    tickets.push_back(++last_ticket_);
    bound_.emplace(last_ticket_, module);
    return last_ticket_;
  }

  std::shared_ptr<const Module> bound(int64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto of_ticket = bound_.find(ticket);
    check(of_ticket != bound_.end(), "no such call is bound");
    return of_ticket->second;
  }

  void forget(int64_t owner) {
    std::list<std::shared_ptr<const Module>> dropped;  // freed behind the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto of_owner = modules_.find(owner);
    if (of_owner != modules_.end()) {
      dropped.swap(of_owner->second);
      modules_.erase(of_owner);
    }
    const auto tickets = tickets_.find(owner);
    if (tickets == tickets_.end()) return;
    for (const int64_t ticket : tickets->second) {
      dropped.push_back(std::move(bound_.at(ticket)));
      bound_.erase(ticket);
    }
    tickets_.erase(tickets);
  }

  // The number of modules that are cached or bound.
  int64_t size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::set<const Module*> kept;
    for (const auto& [owner, modules] : modules_) {
      for (const auto& module : modules) kept.insert(module.get());
    }
    for (const auto& [ticket, module] : bound_) kept.insert(module.get());
    return static_cast<int64_t>(kept.size());
  }

 private:
  std::shared_ptr<const Module> keep(int64_t owner, std::shared_ptr<const Module> module) {
    std::list<std::shared_ptr<const Module>> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& kept = modules_[owner];
    // Modules made from other weights, or before these weights were written, are no longer of use.
    for (auto each = kept.begin(); each != kept.end();) {
      const auto next = std::next(each);
      if (is_outdated(**each, *module, owner != 0)) dropped.splice(dropped.end(), kept, each);
      each = next;
    }
    kept.push_front(module);
    while (kept.size() > (owner ? kKeptOfOwner : kKeptOfNobody))
      dropped.splice(dropped.end(), kept, std::prev(kept.end()));
    return module;
  }

  // Whether a tensor of `old` was written since, or the owner of `old` now has other weights.
  static bool is_outdated(const Module& old, const Module& module, bool has_owner) {
    if (has_owner && old.keys.size() != module.keys.size()) return true;
    bool is_same = old.keys.size() == module.keys.size();
    for (size_t k = 0; k < std::min(old.keys.size(), module.keys.size()); ++k) {
      const bool same_storage =
          old.keys[k].data == module.keys[k].data && old.keys[k].count == module.keys[k].count;
      if (same_storage && old.keys[k].version != module.keys[k].version) return true;
      if (same_storage && old.keys[k].sample != module.keys[k].sample) return true;
      if (has_owner && k >= 1 && !same_storage) return true;
      is_same = is_same && same_storage;
    }
    return is_same && old.boundary == module.boundary &&
           old.version <= module.version;  // another thread made the same module in the meantime
  }

  std::mutex mutex_;
  std::unordered_map<int64_t, std::list<std::shared_ptr<const Module>>> modules_;
  std::unordered_map<int64_t, std::shared_ptr<const Module>> bound_;  // by ticket
  std::unordered_map<int64_t, std::vector<int64_t>> tickets_;         // by owner
  int64_t last_ticket_ = 0;
};

// Never destroyed: at the end of the process, torch, whose tensors the cache holds, may be gone already.
Cache& cache() {
  static Cache* const the_cache = new Cache;
  return *the_cache;
}

std::string shown(const Tensor& tensor) {
  std::string text = "a tensor of shape (";
  for (int64_t d = 0; d < tensor.dim(); ++d) text += (d ? ", " : "") + std::to_string(tensor.size(d));
  return text + ")";
}

// The rows of x as contiguous floats, steps first.
class Rows {
 public:
  Rows(const Tensor& x, const Module& module, bool batch_first) {
    const bool is_float = x.scalar_type() == ScalarType::Float;
    const int64_t width = module.input_width, count = x.numel() / std::max<int64_t>(1, width);
    steps_ = x.dim() == 3 ? x.size(batch_first ? 1 : 0) : 1;
    const int64_t batch = x.dim() == 3 ? x.size(batch_first ? 0 : 1) : count;
    const bool in_order = x.is_contiguous() && (!batch_first || x.dim() < 3 || steps_ == 1 || batch == 1);
    if (is_float && in_order) {
      rows_ = static_cast<const float*>(x.const_data_ptr());
      return;
    }
    const Tensor whole = x.is_contiguous() ? x : torch::stable::contiguous(x);
    copy_.resize(x.numel());
    for (int64_t row = 0; row < count; ++row) {
      const int64_t from = in_order || !batch_first || x.dim() < 3 ? row : row % batch * steps_ + row / batch;
      copy_row(whole, is_float, from * width, row * width, module);
    }
    rows_ = copy_.data();
  }

  const float* data() const { return rows_; }

 private:
  void copy_row(const Tensor& x, bool is_float, int64_t from, int64_t to, const Module& module) {
    if (is_float) {
      std::copy_n(static_cast<const float*>(x.const_data_ptr()) + from, module.input_width,
                  copy_.data() + to);
      return;
    }
    for (const Columns& columns : module.columns) {
      const uint8_t* integers = static_cast<const uint8_t*>(x.const_data_ptr()) + from;
      torchq_compat_to_floats(columns.qparams.data(), integers, columns.width, copy_.data() + to);
      from += columns.width;
      to += columns.width;
    }
  }

  int64_t steps_ = 1;
  const float* rows_ = nullptr;
  std::vector<float> copy_;
};

void check_x(const Tensor& x, const Module& module) {
  check((x.dim() == 2 || x.dim() == 3) && x.size(x.dim() - 1) == module.input_width,
        "x must have " + std::to_string(module.input_width) + " columns, got " + shown(x));
  if (x.scalar_type() == ScalarType::Float) return;
  for (const Columns& columns : module.columns) {
    check(columns.qparams[0] > 0 && x.scalar_type() == integers_on(columns.qparams),
          "x must be torch.float32, or integers with the dtype of its qparams");
  }
}

// Returns the states that a call begins with, in new tensors.
Tensors first_states(const Tensors& given, const Module& module, int64_t batch, bool is_cell) {
  const int64_t rows = module.layers * module.directions;
  check(
      given.empty() || given.size() == module.state_widths.size(),
      std::to_string(module.state_widths.size()) + " states are needed, got " + std::to_string(given.size()));
  Tensors states;
  for (size_t s = 0; s < module.state_widths.size(); ++s) {
    const int64_t width = module.state_widths[s];
    const std::array<int64_t, 3> shape{rows, batch, width};
    const torch::headeronly::IntHeaderOnlyArrayRef sizes(shape.data() + is_cell, 3 - is_cell);
    Tensor state = empty(sizes, ScalarType::Float);
    float* to = static_cast<float*>(state.mutable_data_ptr());
    const int64_t count = rows * batch * width;
    if (given.empty()) {
      std::fill_n(to, count, 0.0f);
    } else {
      const Tensor& from = given[s];
      const auto found = from.sizes();
      check(from.is_cpu() && found.size() == sizes.size() &&
                std::equal(found.begin(), found.end(), sizes.begin()),
            "a state has another shape, or is elsewhere than x: " + shown(from));
      const Tensor whole = from.is_contiguous() ? from : torch::stable::contiguous(from);
      const std::vector<QParams>& qparams = module.state_qparams[s];
      const bool is_float = from.scalar_type() == ScalarType::Float;
      check(is_float || (!qparams.empty() && from.scalar_type() == integers_on(qparams[0])),
            "states must be torch.float32, or integers with the dtype of their qparams");
      if (is_float) std::copy_n(static_cast<const float*>(whole.const_data_ptr()), count, to);
      const int64_t pieces = std::max<int64_t>(1, static_cast<int64_t>(qparams.size())),
                    size = count / pieces;
      for (int64_t piece = 0; piece < pieces && !qparams.empty(); ++piece) {
        const double* numbers = qparams[piece].data();
        if (is_float) {
          torchq_compat_requantize(numbers, to + piece * size, size);
        } else {
          const uint8_t* integers = static_cast<const uint8_t*>(whole.const_data_ptr()) + piece * size;
          torchq_compat_to_floats(numbers, integers, size, to + piece * size);
        }
      }
    }
    states.push_back(state);
  }
  return states;
}

Tensor handed_out(const Tensor& result, const std::vector<QParams>& qparams) {
  if (qparams.empty()) return result;
  Tensor integers = empty(result.sizes(), integers_on(qparams[0]));
  torchq_compat_to_integers(qparams[0].data(), static_cast<const float*>(result.const_data_ptr()),
                            result.numel(), integers.mutable_data_ptr());
  return integers;
}

// Runs one call of a module; `batch_sizes` are those of packed rows, or empty.
Tensors run(const Module& module, const Tensor& x, const Tensors& states,
            const std::vector<int64_t>& batch_sizes, bool batch_first, int64_t work_per_thread) {
  check_x(x, module);
  const bool is_packed = !batch_sizes.empty(), is_cell = x.dim() == 2 && !is_packed;
  check(!is_packed || x.dim() == 2, "packed rows have two dimensions, got " + shown(x));
  check(!is_cell || module.cells.size() == 1,
        "a step of a cell has one layer, x must have three dimensions");
  int64_t rows = 0;
  for (size_t t = 0; t < batch_sizes.size(); ++t) {
    check(batch_sizes[t] > 0 && (t == 0 || batch_sizes[t] <= batch_sizes[t - 1]), "batch sizes grow");
    rows += batch_sizes[t];
  }
  check(!is_packed || rows == x.size(0), "the batch sizes are not those of x");
  const int64_t steps = is_cell     ? 1
                        : is_packed ? static_cast<int64_t>(batch_sizes.size())
                                    : x.size(batch_first ? 1 : 0);
  const int64_t batch = is_cell ? x.size(0) : is_packed ? batch_sizes[0] : x.size(batch_first ? 0 : 1);
  Tensors last = first_states(states, module, batch, is_cell);
  std::vector<float*> pointers;
  for (int64_t cell = 0; cell < static_cast<int64_t>(module.cells.size()); ++cell) {
    for (size_t s = 0; s < last.size(); ++s) {
      pointers.push_back(static_cast<float*>(last[s].mutable_data_ptr()) +
                         cell * batch * module.state_widths[s]);
    }
  }
  Tensors results;
  const int64_t width = module.directions * module.state_widths[0];
  // With one step, or one sequence, both orders are the same.
  const bool turn = batch_first && steps != 1 && batch != 1 && !is_packed;
  if (!is_cell) {
    const std::array<int64_t, 3> shape = batch_first && !turn ? std::array<int64_t, 3>{batch, steps, width}
                                                              : std::array<int64_t, 3>{steps, batch, width};
    const std::array<int64_t, 2> packed{rows, width};
    results.push_back(is_packed ? empty({packed.data(), 2}, ScalarType::Float)
                                : empty({shape.data(), 3}, ScalarType::Float));
  }
  float* output = is_cell ? pointers[0] : static_cast<float*>(results[0].mutable_data_ptr());
  const Rows input(x, module, batch_first);
  const int64_t problem = torchq_compat_run_layers(
      module.cells.data(), module.backward.data(), module.layers, module.directions, steps, batch,
      is_packed ? batch_sizes.data() : nullptr, input.data(), pointers.data(), output,
      static_cast<int64_t>(torch::stable::get_num_threads()), work_per_thread);
  check(problem == 0,
        "no memory for " + std::to_string(steps) + " steps of " + std::to_string(batch) + " rows");
  if (!is_cell) {
    results[0] = handed_out(results[0], module.result_qparams[0]);
    if (turn) results[0] = torch::stable::transpose(results[0], 0, 1);
  }
  for (size_t s = 0; s < last.size(); ++s)
    results.push_back(handed_out(last[s], module.result_qparams[1 + s]));
  return results;
}

Tensors recurrent(const Tensor& x, const Tensors& states, const Tensors& weights, const Tensor& program,
                  const std::vector<double>& boundary, const std::vector<int64_t>& given_sizes,
                  int64_t directions, bool batch_first, int64_t owner, int64_t version,
                  int64_t work_per_thread) {
  // AOTInductor cannot pass an empty list of integers: a single 0 stands for it.
  const bool is_empty = given_sizes.size() == 1 && given_sizes[0] == 0;
  const std::shared_ptr<const Module> module =
      owner == kOwnerOfOneCall ? Cache::made(weights, program, boundary, version, true)
                               : cache().find(owner, weights, program, boundary, version);
  check(directions == module->directions, "the program has another number of directions");
  return run(*module, x, states, is_empty ? std::vector<int64_t>{} : given_sizes, batch_first,
             work_per_thread);
}

int64_t bind_call(const Tensors& weights, const Tensor& program, const std::vector<double>& boundary,
                  int64_t owner, int64_t version) {
  check(owner != 0, "a bound call has an owner");
  return cache().bind(owner, weights, program, boundary, version);
}

void forget(int64_t owner) { cache().forget(owner); }
int64_t kept() { return cache().size(); }

constexpr const char* kSchema =
    "recurrent(Tensor x, Tensor[] states, Tensor[] weights, Tensor program, float[] boundary, int[] "
    "batch_sizes, "
    "int directions, bool batch_first, int owner=0, int version=-1, "
    "int work_per_thread=262144) -> Tensor[]";

// Python has already defined the operator, for its fallback; a program without Python has not. The header's
// way to define it would print an error if it is defined already.
TorchLibraryHandle define_the_operator() {
  TorchLibraryHandle library = nullptr;
  check_call_of_torch(aoti_torch_library_init_fragment("torchq_compat_native", __FILE__, __LINE__, &library));
  [[maybe_unused]] const AOTITorchError is_there = aoti_torch_library_def(library, kSchema);
  return library;
}

[[maybe_unused]] const TorchLibraryHandle kDefinition = define_the_operator();

}  // namespace

// Chains of operators call it, too.
Tensors recurrent_bound(const Tensor& x, const Tensors& states, int64_t ticket, bool batch_first,
                        int64_t work_per_thread) {
  check(x.numel() > 0, "a bound call has at least one step and row");
  const std::shared_ptr<const Module> module = cache().bound(ticket);
  return run(*module, x, states, {}, batch_first, work_per_thread);
}

STABLE_TORCH_LIBRARY_FRAGMENT(torchq_compat_native, library) {
  // For repeated calls of `recurrent` with the same weights: bind_call binds the other arguments.
  library.def("bind_call(Tensor[] weights, Tensor program, float[] boundary, int owner, int version) -> int");
  library.def(
      "recurrent_bound(Tensor x, Tensor[] states, int ticket, bool batch_first, int work_per_thread) -> "
      "Tensor[]");
  library.def("forget(int owner) -> ()");
  library.def("kept() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(torchq_compat_native, CPU, library) {
  library.impl("recurrent", TORCH_BOX(&recurrent));
  library.impl("recurrent_bound", TORCH_BOX(&recurrent_bound));
}

STABLE_TORCH_LIBRARY_IMPL(torchq_compat_native, CompositeExplicitAutograd, library) {
  library.impl("bind_call", TORCH_BOX(&bind_call));
  library.impl("forget", TORCH_BOX(&forget));
  library.impl("kept", TORCH_BOX(&kept));
}
