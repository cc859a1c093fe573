// Quantized recurrent cells over time, on integers: one call for all layers and directions of a module.
//
// A cell is a program (see program.py): instructions over registers of float rows, each followed by the
// quantize-dequantize of its part. A linear computes on the integers of its input and its weight; all other
// instructions are elementwise. Instructions run in stages, and a stage runs over one tile after another. A
// tile is some rows of some hidden units, small enough to stay in the first-level cache from the products to
// the new state.
//
// Threads divide the hidden units: each computes its own units of every gate, so that only the input of a
// linear, which all threads read, needs a barrier. The input has two copies, for even and for odd steps:
// while one is read the other is written.

#include "cell_loop.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "cell_program.h"
#include "instruction_sets.h"
#include "threads.h"

namespace {

// Rows of the input projected at a time, so that the projection stays in the cache.
constexpr int64_t kProjectedRows = 64;
// The most memory that is kept from a call for the next one, and the number of calls it is kept for.
constexpr size_t kKeptBytes = 4 << 20, kKeptScratches = 4;

// The instruction set in use: the best that this CPU has, or the one that was requested.
std::atomic<const Kernels*>& chosen_kernels() {
  static std::atomic<const Kernels*> chosen{nullptr};
  return chosen;
}

const Kernels* kernels_named(const char* name) {
  int64_t count;
  const InstructionSet* sets = instruction_sets(&count);
  for (int64_t i = 0; i < count; ++i) {
    if (sets[i].is_here && (!name || std::strcmp(sets[i].kernels->name, name) == 0)) return sets[i].kernels;
  }
  return nullptr;
}

const Kernels& kernels() {
  const Kernels* chosen = chosen_kernels();
  if (!chosen) {
    const char* asked = std::getenv("TORCHQ_COMPAT_INSTRUCTION_SET");
    chosen = asked ? kernels_named(asked) : nullptr;
    if (!chosen) chosen = kernels_named(nullptr);
    chosen_kernels() = chosen;
  }
  return *chosen;
}

// Gives freed memory back to the system: what is packed next need not fit into the holes that glibc keeps.
void give_back_freed() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Splits a segment into pieces whose products can be summed in 32 bits.
void add_pieces(const Segment& whole, std::vector<Segment>& pieces) {
  int64_t left = static_cast<int64_t>(whole.width);
  do {
    const int64_t width = std::min(left, kSummedColumns);
    pieces.push_back({static_cast<double>(width), whole.qparams});
    left -= width;
  } while (left > 0);
}

struct Range {
  int64_t begin, end;
};

// The groups of lanes that thread `index` computes.
Range share(int64_t groups, int64_t index, int64_t threads) {
  return {groups * index / threads, groups * (index + 1) / threads};
}

// The location of a register's tile: the floats of a segment are contiguous, segments are `stride` apart.
struct Place {
  float* data = nullptr;
  int64_t stride = 0;
};

// The quads of an input that have integers above 128.
struct Excess {
  std::vector<int32_t> quads;
  std::vector<int64_t> ends;       // in quads, by row
  std::vector<char> has_too_many;  // by tile of rows
  int64_t total = 0;               // quads
  std::vector<uint8_t> cut;        // if there are any: rows of whole quads without what is above 128

  const int32_t* begin(int64_t row) const { return quads.data() + (row ? ends[row - 1] : 0); }
  int64_t count(int64_t row) const { return ends[row] - (row ? ends[row - 1] : 0); }
};

// Data that only one thread writes.
struct Own {
  std::vector<Place> places;    // by register
  std::vector<QParams> chosen;  // by input
  std::vector<Excess> excess;   // by product of the stage and segment of its input
};

}  // namespace

struct Scratch {
  std::vector<Own> own;            // by thread
  std::vector<Extremes> extremes;  // by input, parity of the step, and thread
  std::vector<bool> off_qparams;   // inputs whose first state is not rounded to their qparams
  std::vector<std::vector<Vector>> stored;     // registers that several stages read
  std::vector<std::vector<Vector>> states[2];  // by parity of the step
  std::vector<std::vector<Line>> integers[2];  // by parity and input
  std::vector<std::vector<Vector>> floats[2];  // by parity and input
  std::vector<std::vector<Vector>> tiles;      // by thread

  size_t bytes() const {
    size_t sum = 0;
    const auto add = [&](const auto& all) {
      for (const auto& each : all) sum += each.capacity() * sizeof each[0];
    };
    add(stored);
    add(tiles);
    for (int64_t parity = 0; parity < 2; ++parity) {
      add(states[parity]);
      add(integers[parity]);
      add(floats[parity]);
    }
    return sum;
  }
};

TorchqCompatCell::TorchqCompatCell() = default;
TorchqCompatCell::~TorchqCompatCell() = default;

void TorchqCompatCell::prepare() {
  kernels = &::kernels();
  for (size_t i = 0; i < instructions.size(); ++i) {
    const Instruction& by = instructions[i];
    quantizers.push_back(by.quantized ? Quantizer(constants[i].output) : Quantizer());
    if (by.op == kLinear) weight_size += by.segments * by.units * weights[by.weight].inputs;
    add(static_cast<int64_t>(i));
  }
  for (size_t i = 0; i < instructions.size(); ++i) tables.push_back(table_of(i));
  is_stored.assign(registers.size(), false);
  find_readers();
  find_barriers();
  if (packs_late) return;
  for (auto* stages : {&once_stages, &step_stages}) {
    for (Stage& stage : *stages) pack(stage);
  }
}

namespace {

const Written* writer(const Stage& stage, int64_t source) {
  for (const Written& written : stage.written) {
    if (written.source == source) return &written;
  }
  return nullptr;
}

}  // namespace

// Returns a table of results for an operation that is slower than a lookup and whose operand an instruction
// quantized to 8 bits; else an empty table.
Table TorchqCompatCell::table_of(size_t index) const {
  constexpr int64_t kMost = 256;
  const Instruction& by = instructions[index];
  if ((by.op != kSigmoid && by.op != kTanh) || !kernels->look_up[0]) return {};
  for (size_t i = 0; i < instructions.size(); ++i) {
    const Quantizer& of_a = quantizers[i];
    const int64_t count = static_cast<int64_t>(of_a.high - of_a.low) + 1;
    if (instructions[i].target != by.a || of_a.rounding == kFloats || of_a.rounding == kWide || count > kMost ||
        !std::isnormal(of_a.inverse) || of_a.nan < of_a.low || of_a.nan > of_a.high) {
      continue;
    }
    Table table{of_a, std::vector<Vector>(count > kMost / 2 ? kMost / kLanes : kMost / 2 / kLanes)};
    float* values = table.floats.front().lanes;
    for (int64_t k = 0; k < count; ++k) {
      values[k] = (of_a.low - of_a.zero_point + static_cast<float>(k)) * of_a.scale;
    }
    const Quantizer& quantize = quantizers[index];
    kernels->elementwise[by.op][quantize.rounding](values, values, values,
                                                   static_cast<int64_t>(table.floats.size()) * kLanes, quantize);
    return table;
  }
  return {};
}

// Appends an instruction to the last stage; to a new stage if it has other units, or if it is a linear that
// reads what the last stage writes.
void TorchqCompatCell::add(int64_t index) {
  const Instruction& by = instructions[index];
  std::vector<Stage>& stages = by.once ? once_stages : step_stages;
  if (stages.empty() || stages.back().units != by.units ||
      (by.op == kLinear && writer(stages.back(), by.a))) {
    stages.emplace_back();
    stages.back().once = by.once != 0;
    stages.back().units = by.units;
  }
  Stage& stage = stages.back();
  Written written;
  written.source = by.target;
  written.at = stage.vectors;
  stage.vectors += by.segments;
  stage.written.push_back(written);
  if (by.op != kLinear) {
    stage.steps.push_back({false, index});
    return;
  }
  const int64_t input = input_of(by, constants[index]);
  auto product = std::find_if(stage.products.begin(), stage.products.end(),
                              [&](const Product& each) { return each.input == input; });
  if (product == stage.products.end()) {
    stage.steps.push_back({true, static_cast<int64_t>(stage.products.size())});
    stage.products.emplace_back();
    product = std::prev(stage.products.end());
    product->input = input;
  }
  for (int64_t segment = 0; segment < by.segments; ++segment) product->columns.push_back({index, segment});
}

int64_t TorchqCompatCell::input_of(const Instruction& by, const Constants& constant) {
  Input input;
  input.source = by.a;
  input.once = by.once != 0;
  input.is_state = is_state(by.a);
  input.width = weights[by.weight].inputs;
  if (by.a != 0 || constant.input.is_dynamic()) {
    add_pieces({static_cast<double>(input.width), constant.input}, input.segments);
  } else {
    for (const Segment& segment : input_segments) add_pieces(segment, input.segments);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].source == input.source && inputs[i].segments == input.segments) {
      return static_cast<int64_t>(i);
    }
  }
  inputs.push_back(input);
  return static_cast<int64_t>(inputs.size()) - 1;
}

// Finds the readers of what a stage writes, other than the stage itself.
void TorchqCompatCell::find_readers() {
  for (auto* stages : {&once_stages, &step_stages}) {
    for (Stage& stage : *stages) {
      for (const Stage::Step& step : stage.steps) {
        if (step.is_product) continue;
        const Instruction& by = instructions[step.index];
        for (const int64_t source : {by.a, by.b}) {
          const auto is_known = [&](const Read& read) { return read.source == source; };
          if (source < 0 || writer(stage, source) ||
              std::any_of(stage.reads.begin(), stage.reads.end(), is_known)) {
            continue;
          }
          // Rows of x, and rows of several steps, are not in the order of a tile.
          const bool is_copied = source == 0 || stage.once;
          stage.reads.push_back({source, is_copied ? stage.vectors : -1});
          if (is_copied) stage.vectors += registers[source].segments();
          is_stored[source] = source != 0 && !is_state(source);
        }
      }
    }
  }
  for (int64_t state = 0; state < state_count(); ++state) {
    const auto writes = [&](const Stage& stage) { return writer(stage, results[state]) != nullptr; };
    if (std::any_of(step_stages.begin(), step_stages.end(), writes)) continue;
    passed_on.push_back(state);
    if (!is_state(results[state])) is_stored[results[state]] = true;
  }
  state_inputs.resize(results.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].is_state) state_inputs[inputs[i].source - 1].push_back(static_cast<int64_t>(i));
  }
  for (auto* stages : {&once_stages, &step_stages}) {
    for (Stage& stage : *stages) {
      for (Written& written : stage.written) {
        written.is_stored = is_stored[written.source];
        for (size_t i = 0; i < inputs.size(); ++i) {
          if (inputs[i].source == written.source) written.inputs.push_back(static_cast<int64_t>(i));
        }
        for (int64_t state = 0; state < state_count() && !stage.once; ++state) {
          if (results[state] == written.source) written.states.push_back(state);
        }
      }
    }
  }
}

// Puts a barrier before each stage that reads what threads wrote since the last barrier.
void TorchqCompatCell::find_barriers() {
  for (auto* stages : {&once_stages, &step_stages}) {
    std::vector<bool> is_settled(inputs.size(), false);
    for (Stage& stage : *stages) {
      for (const Product& product : stage.products) {
        if (is_settled[product.input]) continue;
        stage.waits = true;
        const Input& input = inputs[product.input];
        if (input.is_dynamic() && input.source != 0) stage.chosen.push_back(product.input);
      }
      if (!stage.waits) continue;
      // The barrier settles all inputs that were written before this stage.
      for (size_t i = 0; i < inputs.size(); ++i) {
        const int64_t source = inputs[i].source;
        const auto is_later = [&](const Stage& other) { return &other >= &stage && writer(other, source); };
        // Dynamic inputs are settled by the stage before which they are quantized.
        const bool is_chosen = std::find(stage.chosen.begin(), stage.chosen.end(), static_cast<int64_t>(i)) !=
                               stage.chosen.end();
        if (std::none_of(stages->begin(), stages->end(), is_later) &&
            (!inputs[i].is_dynamic() || is_chosen)) {
          is_settled[i] = true;
        }
      }
    }
  }
}

void TorchqCompatCell::pack(Stage& stage) const {
  for (Product& product : stage.products) pack(stage, product);
}

void TorchqCompatCell::pack(const Stage& stage, Product& product) const {
  const int64_t groups = stage.groups(), columns = product.column_count(), lanes = groups * kLanes;
  product.scales.resize(columns * lanes);
  product.biases.resize(columns * lanes);
  product.zero_points.resize(columns * lanes);
  int64_t first = 0;
  for (const Segment& part : inputs[product.input].segments) {
    const int64_t count = static_cast<int64_t>(part.width), quads = (count + 3) / 4;
    std::vector<Line> packed(columns * groups * quads);
    std::vector<int32_t> row_sums(columns * lanes);
    for (int64_t c = 0; c < columns; ++c) {
      const Product::Column& column = product.columns[c];
      const Instruction& by = instructions[column.instruction];
      const Weight& weight = weights[by.weight];
      const int64_t before = c / kernels->beside * kernels->beside,
                    beside = std::min(kernels->beside, columns - before);
      for (int64_t unit = 0; unit < by.units; ++unit) {
        const int64_t n = column.segment * by.units + unit, at = c * lanes + unit;
        const Constants& constant = constants[column.instruction];
        product.scales[at] = weight.scales ? weight.scales[n] : static_cast<float>(constant.weight_scale);
        product.biases[at] = weight.bias ? weight.bias[n] : 0.0f;
        product.zero_points[at] =
            static_cast<int32_t>(weight.zero_points ? weight.zero_points[n] : constant.weight_zero_point);
        product.has_zero_points = product.has_zero_points || product.zero_points[at] != 0;
        const int8_t* values = weight.values + n * weight.inputs + first;
        row_sums[at] = std::accumulate(values, values + count, 0);
        Line* to = packed.data() + (unit / kLanes * columns + before) * quads + (c - before);
        for (int64_t k = 0; k < count; ++k) {
          to[k / 4 * beside].integers[unit % kLanes * 4 + k % 4] = static_cast<uint8_t>(values[k]);
        }
      }
    }
    product.packed.push_back(std::move(packed));
    product.row_sums.push_back(std::move(row_sums));
    first += count;
  }
}

namespace {

using Cell = TorchqCompatCell;

std::unique_ptr<Scratch> take_scratch(const Cell& cell) {
  const std::lock_guard<std::mutex> lock(cell.mutex);
  if (cell.kept.empty()) return std::make_unique<Scratch>();
  std::unique_ptr<Scratch> taken = std::move(cell.kept.back());
  cell.kept.pop_back();
  return taken;
}

void give_back(const Cell& cell, std::unique_ptr<Scratch> scratch) {
  if (scratch->bytes() > kKeptBytes) return;
  const std::lock_guard<std::mutex> lock(cell.mutex);
  if (cell.kept.size() < kKeptScratches) cell.kept.push_back(std::move(scratch));
}

// Like torch.ops.quantized_decomposed.choose_qparams. One NaN or infinity makes all quantized values NaN.
QParams choose_qparams(const QParams& dynamic, const Extremes& of) {
  const float first = static_cast<float>(dynamic.quant_min), last = static_cast<float>(dynamic.zero_point);
  const float scale = std::max((of.high - of.low) / (last - first), static_cast<float>(-dynamic.scale));
  if (!std::isfinite(scale) || of.has_nan) {
    return {std::nan(""), dynamic.quant_min, dynamic.quant_min, dynamic.quant_max, dynamic.nan};
  }
  const float zero_point = std::min(std::max(first - std::rint(of.low / scale), first), last);
  return {scale, zero_point, dynamic.quant_min, dynamic.quant_max, dynamic.nan};
}

// The shift of signed integers, which are stored unsigned.
int32_t shift_of(const QParams& qparams) { return qparams.quant_min < 0 ? 128 : 0; }

// Some rows of some groups of lanes; all rows if it has several groups.
struct Tile {
  int64_t first_row, rows, first_group, groups;

  int64_t vectors() const { return rows * groups; }
};

// One piece of a thread's work: a step, or what is computed at once for several steps.
struct Work {
  Worker worker;
  int64_t step;    // the first step
  int64_t count;   // number of steps
  int64_t at;      // index of the step in the block
  int64_t parity;  // which copy of the inputs is read
  bool once;
};

// One direction over time.
class Loop {
 public:
  // States are read and written in place; rows of the output are `output_stride` apart. Dynamic qparams of x
  // are chosen from the `all_rows` rows at `all_x`, which include x.
  Loop(const Cell& cell, int64_t steps, int64_t batch, bool backward, const float* x, const float* all_x,
       int64_t all_rows, float* const* states, float* output, int64_t output_stride, int64_t threads)
      : cell_(cell),
        kernels_(*cell.kernels),
        steps_(steps),
        batch_(batch),
        output_stride_(output_stride),
        backward_(backward),
        x_(x),
        output_(output),
        states_(states),
        team_(threads),
        scratch_(take_scratch(cell)),
        block_(std::min(steps, std::max<int64_t>(1, projected_rows(cell) / batch))),
        threads_(threads),
        off_qparams_(scratch_->off_qparams),
        extremes_(scratch_->extremes),
        own_(scratch_->own) {
    const size_t inputs = cell.inputs.size();
    off_qparams_.assign(inputs, false);
    extremes_.assign(2 * threads * inputs, Extremes());
    grow(own_, threads);
    scratch_->tiles.resize(std::max<size_t>(scratch_->tiles.size(), threads));
    scratch_->stored.resize(cell.registers.size());
    for (size_t r = 0; r < cell.registers.size(); ++r) {
      if (!cell.is_stored[r]) continue;
      grow(scratch_->stored[r], cell.registers[r].vectors() * batch * (cell.registers[r].once ? block_ : 1));
    }
    for (int64_t parity = 0; parity < 2; ++parity) {
      scratch_->integers[parity].resize(inputs);
      scratch_->floats[parity].resize(inputs);
      scratch_->states[parity].resize(cell.state_count());
    }
    for (size_t i = 0; i < inputs; ++i) allocate(static_cast<int64_t>(i));
    int64_t vectors = 0;
    for (const auto* stages : {&cell.once_stages, &cell.step_stages}) {
      for (const Stage& stage : *stages) vectors = std::max(vectors, stage.vectors * kTileVectors);
    }
    for (int64_t t = 0; t < threads; ++t) {
      grow(scratch_->tiles[t], vectors);
      own_[t].places.resize(cell.registers.size());
      own_[t].chosen.resize(inputs);
    }
    choose_for_x(all_x, all_rows);
    for (int64_t s = 0; s < cell.state_count(); ++s) read_state(s);
  }

  Loop(const Loop&) = delete;
  ~Loop() { give_back(cell_, std::move(scratch_)); }

  void run() {
    team_.run([this](const Worker& worker) {
      for (int64_t done = 0, block = 0; done < steps_; done += block_, ++block) {
        const int64_t count = std::min(block_, steps_ - done);
        read_x(worker, done, count, block % 2);
        with_packed(cell_.once_stages, [&](const std::vector<Stage>& stages) {
          for (const Stage& stage : stages) run_stage(stage, {worker, done, count, 0, block % 2, true});
        });
        with_packed(cell_.step_stages, [&](const std::vector<Stage>& stages) {
          for (int64_t step = done; step < done + count; ++step) {
            const int64_t at = backward_ ? count - 1 - (step - done) : step - done;
            const Work work{worker, step, 1, at, step % 2, false};
            forget_extremes(work);
            for (const Stage& stage : stages) run_stage(stage, work);
            for (const int64_t state : cell_.passed_on) pass_on(state, work);
          }
        });
      }
    });
  }

 private:
  // Calls function(stages), of a cell that packs late with copies that are packed for this call.
  template <class Function>
  void with_packed(const std::vector<Stage>& stages, Function function) const {
    if (!cell_.packs_late) return function(stages);
    {
      std::vector<Stage> packed = stages;
      for (Stage& stage : packed) cell_.pack(stage);
      function(packed);
    }
    give_back_freed();
  }

  // The rows of x whose projection is kept: where weights are packed for each block of steps, as many as take
  // about their memory.
  static int64_t projected_rows(const Cell& cell) {
    if (!cell.packs_late) return kProjectedRows;
    int64_t width = 1;
    for (const Register& shape : cell.registers) width += shape.once ? shape.width : 0;
    return std::max(kProjectedRows, cell.weight_size / width / static_cast<int64_t>(sizeof(float)));
  }

  template <class T>
  static void grow(std::vector<T>& memory, int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  }

  // Whether an input is kept in floats: it has no integers, or none until its qparams are chosen.
  static bool keeps_floats(const Input& input) {
    return input.in_floats() || (input.is_dynamic() && input.source != 0);
  }

  void allocate(int64_t index) {
    const Input& input = cell_.inputs[index];
    const int64_t rows = batch_ * (input.once ? block_ : 1);
    const int64_t parities = steps_ == 1 ? 1 : 2;
    for (int64_t parity = 0; parity < parities; ++parity) {
      // One more line, because the last column is read together with three columns after it.
      if (!input.in_floats()) {
        grow(scratch_->integers[parity][index],
             rows * input.stride() / static_cast<int64_t>(sizeof(Line)) + 1);
      }
      if (keeps_floats(input)) {
        grow(scratch_->floats[parity][index], rows * input.stride() / kLanes + 1);
      }
    }
  }

  uint8_t* integers(int64_t input, int64_t parity) {
    return reinterpret_cast<uint8_t*>(scratch_->integers[parity][input].data());
  }
  float* floats(int64_t input, int64_t parity) {
    return reinterpret_cast<float*>(scratch_->floats[parity][input].data());
  }
  Extremes& extremes(int64_t input, int64_t parity, int64_t thread) {
    return extremes_[(input * 2 + parity) * threads_ + thread];
  }

  // The first row of x in memory that `count` steps from `step` on read.
  int64_t first_row(int64_t step, int64_t count) const {
    return (backward_ ? steps_ - step - count : step) * batch_;
  }

  const float* rows_of_x(const Work& work) const {
    return x_ + first_row(work.step, work.count) * cell_.registers[0].width;
  }

  void choose_for_x(const float* x, int64_t rows) {
    for (size_t i = 0; i < cell_.inputs.size(); ++i) {
      const Input& input = cell_.inputs[i];
      if (!input.is_dynamic() || input.source != 0) continue;
      Extremes seen;
      kernels_.see(x, rows * input.width, seen);
      const QParams chosen = choose_qparams(input.segments[0].qparams, seen);
      for (Own& own : own_) own.chosen[i] = chosen;
    }
  }

  // Copies the state that the first step reads, and makes the inputs of the linears that read it.
  void read_state(int64_t state) {
    const Register& shape = cell_.registers[1 + state];
    auto& to = scratch_->states[0][state];
    grow(to, shape.vectors() * batch_);
    if (steps_ > 1) grow(scratch_->states[1][state], shape.vectors() * batch_);
    const float* from = states_[state];
    for (int64_t segment = 0; segment < shape.segments(); ++segment) {
      for (int64_t group = 0; group < shape.groups(); ++group) {
        const int64_t lanes = std::min(kLanes, shape.units - group * kLanes);
        Vector* vectors = to.data() + (segment * shape.groups() + group) * batch_;
        for (int64_t row = 0; row < batch_; ++row) {
          std::copy_n(from + row * shape.width + segment * shape.units + group * kLanes, lanes,
                      vectors[row].lanes);
        }
      }
    }
    for (const int64_t i : cell_.state_inputs[state]) {
      const Input& input = cell_.inputs[i];
      bool is_on = false;
      if (!keeps_floats(input)) {
        const QParams& qparams = input.segments[0].qparams;
        const Quantizer quantize(qparams);
        is_on = kernels_.is_on(quantize, from, batch_ * input.width);
        if (is_on) {
          kernels_.to_integers(quantize, shift_of(qparams), from, input.width, batch_, input.width,
                               integers(i, 0), input.stride());
        }
      }
      if (is_on) continue;
      off_qparams_[i] = !keeps_floats(input);
      grow(scratch_->floats[0][i], batch_ * input.stride() / kLanes + 1);
      for (int64_t row = 0; row < batch_; ++row) {
        std::copy_n(from + row * input.width, input.width, floats(i, 0) + row * input.stride());
      }
      if (input.is_dynamic()) kernels_.see(from, batch_ * input.width, extremes(i, 0, 0));
    }
  }

  // Makes the inputs of the linears that read x; threads divide the rows.
  void read_x(const Worker& worker, int64_t step, int64_t count, int64_t parity) {
    const int64_t width = cell_.registers[0].width, rows = count * batch_;
    const float* x = x_ + first_row(step, count) * width;
    const Range own = share(rows, worker.index, worker.count);
    for (size_t i = 0; i < cell_.inputs.size(); ++i) {
      const Input& input = cell_.inputs[i];
      if (input.source != 0) continue;
      int64_t first = 0;
      for (const Segment& part : input.segments) {
        const int64_t columns = static_cast<int64_t>(part.width);
        const QParams& qparams = input.is_dynamic() ? own_[worker.index].chosen[i] : part.qparams;
        const Quantizer quantize(input.in_floats() ? QParams{1, 0, 0, 0, 0} : qparams);
        const float* from = x + own.begin * width + first;
        const int64_t at = own.begin * input.stride() + first;
        if (!input.in_floats()) {
          kernels_.to_integers(quantize, shift_of(qparams), from, width, own.end - own.begin, columns,
                               integers(i, parity) + at, input.stride());
        }
        for (int64_t row = 0; row < own.end - own.begin && input.in_floats(); ++row) {
          std::copy_n(from + row * width, columns, floats(i, parity) + at + row * input.stride());
        }
        first += columns;
      }
    }
  }

  // Resets the extremes that this step writes; other threads may still read those of the step before.
  void forget_extremes(const Work& work) {
    for (size_t i = 0; i < cell_.inputs.size(); ++i) {
      const Input& input = cell_.inputs[i];
      if (!input.is_dynamic() || input.source == 0) continue;
      extremes(i, input.is_state ? 1 - work.parity : work.parity, work.worker.index) = Extremes();
    }
  }

  // Chooses dynamic qparams from what all threads wrote; each thread then quantizes its own columns.
  void choose(const Stage& stage, const Work& work) {
    Own& own = own_[work.worker.index];
    for (const int64_t i : stage.chosen) {
      const Input& input = cell_.inputs[i];
      Extremes seen;
      for (int64_t t = 0; t < work.worker.count; ++t) seen.add(extremes(i, work.parity, t));
      own.chosen[i] = choose_qparams(input.segments[0].qparams, seen);
      const Quantizer quantize(own.chosen[i]);
      const Range groups = share((input.width + kLanes - 1) / kLanes, work.worker.index, work.worker.count);
      const int64_t first = groups.begin * kLanes, last = std::min(input.width, groups.end * kLanes);
      if (first >= last) continue;
      kernels_.to_integers(quantize, shift_of(own.chosen[i]), floats(i, work.parity) + first, input.stride(),
                           batch_, last - first, integers(i, work.parity) + first, input.stride());
    }
    team_.barrier(work.worker);
  }

  void run_stage(const Stage& stage, const Work& work) {
    if (stage.waits) team_.barrier(work.worker);
    if (!stage.chosen.empty()) choose(stage, work);
    const int64_t rows = work.count * batch_;
    if (kernels_.find_excess) find_excess(stage, work, rows);
    each_tile(stage.groups(), rows, work, [&](const Tile& tile) {
      place(stage, work, tile);
      for (const Stage::Step& step : stage.steps) {
        if (step.is_product) {
          multiply(stage, step.index, work, tile);
        } else {
          elementwise(step.index, work, tile);
        }
      }
      for (const Written& written : stage.written) hand_on(written, work, tile);
    });
  }

  // Finds what is above 128 in what the products of a stage read: FX's observers reduce the range to 7 bits,
  // and few values or none exceed it.
  void find_excess(const Stage& stage, const Work& work, int64_t rows) {
    std::vector<Excess>& all = own_[work.worker.index].excess;
    size_t next = 0;
    for (const Product& product : stage.products) {
      const Input& input = cell_.inputs[product.input];
      const uint8_t* x = input.in_floats() ? nullptr : integers(product.input, work.parity);
      for (const Segment& part : input.segments) {
        if (next == all.size()) all.emplace_back();
        Excess& excess = all[next++];
        if (x) find_excess(x, input.stride(), rows, static_cast<int64_t>(part.width), excess);
        if (x) x += static_cast<int64_t>(part.width);
      }
    }
  }

  void find_excess(const uint8_t* x, int64_t stride, int64_t rows, int64_t width, Excess& excess) const {
    const int64_t quads = (width + 3) / 4;
    grow(excess.quads, rows * quads);
    grow(excess.ends, rows);
    excess.has_too_many.assign((rows + kTileVectors - 1) / kTileVectors, 0);
    excess.total = 0;
    for (int64_t row = 0; row < rows; ++row) {
      excess.total += kernels_.find_excess(x + row * stride, width, excess.quads.data() + excess.total);
      excess.ends[row] = excess.total;
      if (excess.count(row) > quads / 4) excess.has_too_many[row / kTileVectors] = 1;
    }
    if (!excess.total) return;
    grow(excess.cut, rows * 4 * quads);
    for (int64_t row = 0; row < rows; ++row) {
      if (excess.has_too_many[row / kTileVectors]) continue;
      std::transform(x + row * stride, x + row * stride + 4 * quads, excess.cut.data() + row * 4 * quads,
                     [](uint8_t integer) { return std::min<uint8_t>(integer, 128); });
    }
  }

  // Every other step goes through the weights backwards, from those that are still in the cache.
  template <class Function>
  void each_tile(int64_t all_groups, int64_t rows, const Work& work, Function function) const {
    const Range own = share(all_groups, work.worker.index, work.worker.count);
    const int64_t groups = std::max<int64_t>(1, kTileVectors / rows);
    const int64_t count = (own.end - own.begin + groups - 1) / groups;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t group = own.begin + (work.parity ? count - 1 - t : t) * groups;
      for (int64_t row = 0; row < rows; row += kTileVectors) {
        function(Tile{row, std::min(kTileVectors, rows - row), group, std::min(groups, own.end - group)});
      }
    }
  }

  // Sets the locations of all registers that a stage reads and writes.
  void place(const Stage& stage, const Work& work, const Tile& tile) {
    std::vector<Place>& places = own_[work.worker.index].places;
    Vector* memory = scratch_->tiles[work.worker.index].data();
    for (const Written& written : stage.written) {
      places[written.source] = is_written_in_place(written, work, tile)
                                   ? stored_of_step(written.source, tile)
                                   : Place{memory[written.at * kTileVectors].lanes, kTileVectors * kLanes};
    }
    for (const Read& read : stage.reads) {
      if (read.at < 0) {
        places[read.source] = stored(read.source, work, tile);
        continue;
      }
      const Place to{memory[read.at * kTileVectors].lanes, kTileVectors * kLanes};
      places[read.source] = to;
      copy_in(read.source, to, work, tile);
    }
  }

  // Whether a tile of a register that is computed for several steps at once is part of one step, so that it
  // can be written to where later stages read it.
  bool is_written_in_place(const Written& written, const Work& work, const Tile& tile) const {
    return work.once && written.is_stored && cell_.registers[written.source].once && tile.groups == 1 &&
           tile.first_row / batch_ == (tile.first_row + tile.rows - 1) / batch_;
  }

  Place stored_of_step(int64_t source, const Tile& tile) {
    Vector* vectors = of_step(source, tile.first_row / batch_, 0, tile.first_group);
    return {vectors[tile.first_row % batch_].lanes, cell_.registers[source].groups() * batch_ * kLanes};
  }

  Place stored(int64_t source, const Work& work, const Tile& tile) {
    const Register& shape = cell_.registers[source];
    Vector* vectors = cell_.is_state(source) ? scratch_->states[work.parity][source - 1].data()
                                             : scratch_->stored[source].data();
    if (shape.once) vectors += work.at * shape.vectors() * batch_;
    return {vectors[tile.first_group * batch_ + tile.first_row].lanes, shape.groups() * batch_ * kLanes};
  }

  // Copies x, or what was computed from x for several steps, into the order of a tile.
  void copy_in(int64_t source, const Place& to, const Work& work, const Tile& tile) {
    const Register& shape = cell_.registers[source];
    const float* x = source == 0 ? rows_of_x(work) : nullptr;
    for (int64_t segment = 0; segment < shape.segments(); ++segment) {
      for (int64_t g = 0; g < tile.groups; ++g) {
        const int64_t group = tile.first_group + g;
        const int64_t lanes = std::min(kLanes, shape.units - group * kLanes);
        for (int64_t r = 0; r < tile.rows; ++r) {
          float* vector = to.data + segment * to.stride + (g * tile.rows + r) * kLanes;
          const int64_t row = tile.first_row + r;
          if (x) {
            std::copy_n(x + row * shape.width + segment * shape.units + group * kLanes, lanes, vector);
          } else {
            copy(of_step(source, row / batch_, segment, group)[row % batch_].lanes, kLanes, vector);
          }
        }
      }
    }
  }

  // The rows of one step in a register that is computed for several steps at once.
  Vector* of_step(int64_t source, int64_t step, int64_t segment, int64_t group) {
    const Register& shape = cell_.registers[source];
    const int64_t at = (step * shape.segments() + segment) * shape.groups() + group;
    return scratch_->stored[source].data() + at * batch_;
  }

  // The size of a whole vector is a constant, which the compiler copies inline.
  static void copy(const float* from, int64_t count, float* to) {
    if (count == kLanes) {
      std::memcpy(to, from, kLanes * sizeof(float));
    } else {
      std::copy_n(from, count, to);
    }
  }

  void elementwise(int64_t index, const Work& work, const Tile& tile) {
    const Instruction& by = cell_.instructions[index];
    const std::vector<Place>& places = own_[work.worker.index].places;
    const Quantizer& quantize = cell_.quantizers[index];
    const auto function = kernels_.elementwise[by.op][quantize.rounding];
    const Place &a = places[by.a], &b = places[by.b < 0 ? by.a : by.b], &to = places[by.target];
    const int64_t a_segment = by.a_offset / by.units,
                  b_segment = by.b < 0 ? a_segment : by.b_offset / by.units;
    const int64_t count = tile.vectors() * kLanes;
    const Table& table = cell_.tables[index];
    for (int64_t segment = 0; segment < by.segments; ++segment) {
      if (!table.floats.empty()) {
        kernels_.look_up[table.size()](table.data(), a.data + (a_segment + segment) * a.stride,
                                       to.data + segment * to.stride, count, table.of_operand);
        continue;
      }
      function(a.data + (a_segment + segment) * a.stride, b.data + (b_segment + segment) * b.stride,
               to.data + segment * to.stride, count, quantize);
    }
  }

  void multiply(const Stage& stage, int64_t index, const Work& work, const Tile& tile) {
    const Product& product = stage.products[index];
    const Input& input = cell_.inputs[product.input];
    const Excess* excess = nullptr;
    if (kernels_.find_excess) {
      excess = own_[work.worker.index].excess.data();
      for (int64_t p = 0; p < index; ++p) excess += cell_.inputs[stage.products[p].input].segments.size();
    }
    const bool in_floats =
        input.in_floats() || (input.is_state && work.step == 0 && off_qparams_[product.input]);
    for (int64_t g = 0; g < tile.groups; ++g) {
      for (int64_t c = 0; c < product.column_count(); c += kernels_.beside) {
        const int64_t columns = std::min(kernels_.beside, product.column_count() - c);
        if (in_floats) {
          multiply_floats(stage, product, work, tile, g, c, columns);
        } else {
          multiply_integers(stage, product, work, tile, g, c, columns, excess);
        }
      }
    }
  }

  // Computes one group of lanes of some columns.
  void multiply_integers(const Stage& stage, const Product& product, const Work& work, const Tile& tile,
                         int64_t g, int64_t c, int64_t columns, const Excess* excess) {
    const Input& input = cell_.inputs[product.input];
    const uint8_t* x = integers(product.input, work.parity) + tile.first_row * input.stride();
    const int64_t group = tile.first_group + g, lanes = stage.groups() * kLanes;
    alignas(64) int32_t sums[kColumns * kTileVectors * kLanes];
    for (size_t p = 0; p < input.segments.size(); ++p) {
      const int64_t width = static_cast<int64_t>(input.segments[p].width), quads = (width + 3) / 4;
      const QParams& qparams =
          input.is_dynamic() ? own_[work.worker.index].chosen[product.input] : input.segments[p].qparams;
      const Line* w = product.packed[p].data() + (group * product.column_count() + c) * quads;
      const bool is_last = p + 1 == input.segments.size();
      // Since a step before, weights have passed through L1; the products take as long as it takes to load these.
      for (int64_t k = 0; k < columns; ++k) {
        const int64_t at = (c + k) * lanes + group * kLanes;
        __builtin_prefetch(product.row_sums[p].data() + at);
        __builtin_prefetch(product.scales.data() + at);
        if (is_last) __builtin_prefetch(product.biases.data() + at);
      }
      if (excess && !excess[p].has_too_many[tile.first_row / kTileVectors]) {
        const bool is_cut = excess[p].total > 0;
        kernels_.narrow_products[columns](
            is_cut ? excess[p].cut.data() + tile.first_row * 4 * quads : x,
            is_cut ? 4 * quads : input.stride(), tile.rows, w, quads, sums);
        for (int64_t row = 0; row < tile.rows; ++row) {
          const int64_t count = excess[p].count(tile.first_row + row);
          if (!count) continue;
          kernels_.add_excess[columns](x + row * input.stride(), w, excess[p].begin(tile.first_row + row), count,
                                       sums + row * kLanes);
        }
      } else {
        kernels_.products[columns](x, input.stride(), tile.rows, w, quads, sums);
      }
      const int32_t zero_point = static_cast<int32_t>(qparams.zero_point) + shift_of(qparams);
      if (product.has_zero_points) {
        for (int64_t k = 0; k < columns; ++k) {
          subtract_zero_points(product.zero_points.data() + (c + k) * lanes + group * kLanes, x,
                               input.stride(), tile.rows, width, zero_point,
                               sums + k * kTileVectors * kLanes);
        }
      }
      for (int64_t k = 0; k < columns; ++k) {
        const int64_t at = (c + k) * lanes + group * kLanes;
        const ColumnNumbers numbers{product.row_sums[p].data() + at,
                                    product.scales.data() + at,
                                    is_last ? product.biases.data() + at : nullptr,
                                    static_cast<float>(qparams.scale),
                                    zero_point - kernels_.input_shift,
                                    p > 0};
        const Product::Column& column = product.columns[c + k];
        const Quantizer& quantize = cell_.quantizers[column.instruction];
        kernels_.finish[is_last ? quantize.rounding : kFloats](
            sums + k * kTileVectors * kLanes, tile.rows, numbers, target(column, work, tile, g), quantize);
      }
      x += width;
    }
  }

  void multiply_floats(const Stage& stage, const Product& product, const Work& work, const Tile& tile,
                       int64_t g, int64_t c, int64_t columns) {
    const Input& input = cell_.inputs[product.input];
    const float* x = floats(product.input, work.parity) + tile.first_row * input.stride();
    const int64_t group = tile.first_group + g, lanes = stage.groups() * kLanes;
    alignas(64) float sums[kTileVectors * kLanes];
    for (size_t p = 0; p < input.segments.size(); ++p) {
      const int64_t width = static_cast<int64_t>(input.segments[p].width), quads = (width + 3) / 4;
      const Line* w = product.packed[p].data() + (group * product.column_count() + c) * quads;
      const bool is_last = p + 1 == input.segments.size();
      for (int64_t k = 0; k < columns; ++k) {
        const int64_t at = (c + k) * lanes + group * kLanes;
        kernels_.float_products(x, input.stride(), tile.rows, w + k, columns, quads,
                                product.zero_points.data() + at, sums);
        const ColumnNumbers numbers{
            nullptr, product.scales.data() + at, is_last ? product.biases.data() + at : nullptr, 1.0f, 0,
            p > 0};
        const Product::Column& column = product.columns[c + k];
        const Quantizer& quantize = cell_.quantizers[column.instruction];
        kernels_.finish_floats[is_last ? quantize.rounding : kFloats](
            sums, tile.rows, numbers, target(column, work, tile, g), quantize);
      }
      x += width;
    }
  }

  float* target(const Product::Column& column, const Work& work, const Tile& tile, int64_t g) {
    const Place& to = own_[work.worker.index].places[cell_.instructions[column.instruction].target];
    return to.data + column.segment * to.stride + g * tile.rows * kLanes;
  }

  static void subtract_zero_points(const int32_t* zero_points, const uint8_t* x, int64_t stride, int64_t rows,
                                   int64_t width, int32_t zero_point, int32_t* sums) {
    for (int64_t row = 0; row < rows; ++row) {
      int32_t sum = 0;
      for (int64_t k = 0; k < width; ++k) sum += x[row * stride + k] - zero_point;
      for (int64_t lane = 0; lane < kLanes; ++lane) sums[row * kLanes + lane] -= zero_points[lane] * sum;
    }
  }

  // Passes what a stage wrote into a tile on to its other readers.
  void hand_on(const Written& written, const Work& work, const Tile& tile) {
    if (!written.is_stored && written.inputs.empty() && written.states.empty()) return;
    const Place& from = own_[work.worker.index].places[written.source];
    if (written.is_stored && !is_written_in_place(written, work, tile)) {
      store(written.source, from, work, tile);
    }
    for (const int64_t input : written.inputs) give(input, work.parity, from, work, tile);
    for (const int64_t state : written.states) carry(state, from, work, tile);
  }

  void store(int64_t source, const Place& from, const Work& work, const Tile& tile) {
    const Register& shape = cell_.registers[source];
    for (int64_t segment = 0; segment < shape.segments(); ++segment) {
      const float* vectors = from.data + segment * from.stride;
      if (!shape.once) {
        const Place to = stored(source, work, tile);
        std::copy_n(vectors, tile.vectors() * kLanes, to.data + segment * to.stride);
        continue;
      }
      for (int64_t g = 0; g < tile.groups; ++g) {
        for (int64_t r = 0, together; r < tile.rows; r += together) {
          const int64_t step = (tile.first_row + r) / batch_, row = (tile.first_row + r) % batch_;
          together = std::min(batch_ - row, tile.rows - r);
          float* to = of_step(source, step, segment, tile.first_group + g)[row].lanes;
          const float* row_vectors = vectors + (g * tile.rows + r) * kLanes;
          if (together == 1) {
            copy(row_vectors, kLanes, to);
          } else {
            std::copy_n(row_vectors, together * kLanes, to);
          }
        }
      }
    }
  }

  // Calls function(floats, rows, count, row, column) for each contiguous part of a tile: `count` floats of
  // each of `rows` rows, which are kLanes apart.
  template <class Function>
  static void each_run(const Register& shape, const Place& from, const Tile& tile, Function function) {
    for (int64_t segment = 0; segment < shape.segments(); ++segment) {
      const float* vectors = from.data + segment * from.stride;
      const int64_t column = segment * shape.units;
      if (tile.rows == 1) {
        const int64_t first = tile.first_group * kLanes;
        const int64_t count = std::min(shape.units - first, tile.groups * kLanes);
        function(vectors, int64_t{1}, count, tile.first_row, column + first);
        continue;
      }
      for (int64_t g = 0; g < tile.groups; ++g) {
        const int64_t first = (tile.first_group + g) * kLanes, lanes = std::min(kLanes, shape.units - first);
        function(vectors + g * tile.rows * kLanes, tile.rows, lanes, tile.first_row, column + first);
      }
    }
  }

  static void copy_rows(const float* from, int64_t rows, int64_t count, float* to, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row) copy(from + row * kLanes, count, to + row * stride);
  }

  // Writes a tile of a register to an input of linears.
  void give(int64_t index, int64_t parity, const Place& from, const Work& work, const Tile& tile) {
    const Input& input = cell_.inputs[index];
    const Register& shape = cell_.registers[input.source];
    if (!keeps_floats(input)) {
      const QParams& qparams = input.segments[0].qparams;
      const Quantizer quantize(qparams);
      uint8_t* to = integers(index, parity);
      each_run(shape, from, tile,
               [&](const float* values, int64_t rows, int64_t count, int64_t row, int64_t column) {
                 kernels_.to_integers(quantize, shift_of(qparams), values, kLanes, rows, count,
                                      to + row * input.stride() + column, input.stride());
               });
      return;
    }
    float* to = floats(index, parity);
    Extremes& seen = extremes(index, parity, work.worker.index);
    each_run(shape, from, tile,
             [&](const float* values, int64_t rows, int64_t count, int64_t row, int64_t column) {
               copy_rows(values, rows, count, to + row * input.stride() + column, input.stride());
               for (int64_t r = 0; r < rows && input.is_dynamic(); ++r)
                 kernels_.see(values + r * kLanes, count, seen);
             });
  }

  // Writes the new value of a state: to the output, and to the next step or the caller's states.
  void carry(int64_t state, const Place& from, const Work& work, const Tile& tile) {
    const Register& shape = cell_.registers[1 + state];
    if (state == 0) {
      float* output = output_ + first_row(work.step, 1) * output_stride_;
      each_run(shape, from, tile,
               [&](const float* values, int64_t rows, int64_t count, int64_t row, int64_t column) {
                 copy_rows(values, rows, count, output + row * output_stride_ + column, output_stride_);
               });
    }
    if (work.step == steps_ - 1) {
      each_run(shape, from, tile,
               [&](const float* values, int64_t rows, int64_t count, int64_t row, int64_t column) {
                 copy_rows(values, rows, count, states_[state] + row * shape.width + column, shape.width);
               });
      return;
    }
    const int64_t next = 1 - work.parity;
    Vector* vectors = scratch_->states[next][state].data() + tile.first_group * batch_ + tile.first_row;
    for (int64_t segment = 0; segment < shape.segments(); ++segment) {
      std::copy_n(from.data + segment * from.stride, tile.vectors() * kLanes,
                  vectors[segment * shape.groups() * batch_].lanes);
    }
    for (const int64_t input : cell_.state_inputs[state]) give(input, next, from, work, tile);
  }

  // Writes the new value of a state that is another state, or was computed from x alone.
  void pass_on(int64_t state, const Work& work) {
    each_tile(cell_.registers[1 + state].groups(), batch_, work,
              [&](const Tile& tile) { carry(state, stored(cell_.results[state], work, tile), work, tile); });
  }

  const Cell& cell_;
  const Kernels& kernels_;
  const int64_t steps_, batch_, output_stride_;
  const bool backward_;
  const float* x_;
  float* output_;
  float* const* states_;
  Team team_;
  std::unique_ptr<Scratch> scratch_;
  const int64_t block_;            // number of steps whose part without a state is computed at once
  const int64_t threads_;
  std::vector<bool>& off_qparams_;
  std::vector<Extremes>& extremes_;
  std::vector<Own>& own_;
};

// Runs one direction of one layer; `rows` is the number of rows of x.
void run_direction(const Cell& cell, bool backward, int64_t steps, int64_t batch, const int64_t* batch_sizes,
                   int64_t rows, const float* x, float* const* states, float* output, int64_t output_stride,
                   int64_t threads, int64_t work_per_thread) {
  const auto run = [&](int64_t first, int64_t count, int64_t size) {
    const int64_t work = cell.packs_late ? 0 : cell.weight_size * size;
    const int64_t wanted = work / std::max<int64_t>(1, work_per_thread);
    Loop(cell, count, size, backward, x + first * cell.registers[0].width, x, rows, states,
         output + first * output_stride, output_stride, usable_threads(std::min(threads, wanted)))
        .run();
  };
  if (!batch_sizes) return run(0, steps, batch);
  // All steps of one batch size run at once; states of sequences that have ended, or not begun, are kept.
  int64_t first_row = backward ? rows : 0;
  for (int64_t step = backward ? steps - 1 : 0; step >= 0 && step < steps;) {
    const int64_t size = batch_sizes[step], direction = backward ? -1 : 1;
    int64_t count = 0;
    for (; step >= 0 && step < steps && batch_sizes[step] == size; step += direction) ++count;
    if (backward) first_row -= count * size;
    run(first_row, count, size);
    if (!backward) first_row += count * size;
  }
}

QParams qparams_of(const double* qparams) {
  return {qparams[0], qparams[1], qparams[2], qparams[3], qparams[4]};
}

}  // namespace

extern "C" TorchqCompatCell* torchq_compat_prepare_cell(const int64_t* instructions, const double* constants,
                                                        int64_t instruction_count, const int64_t* registers,
                                                        int64_t register_count, const int64_t* results,
                                                        int64_t state_count, const void* const* weights,
                                                        const int64_t* weight_inputs, int64_t weight_count,
                                                        const double* input_segments,
                                                        int64_t input_segment_count,
                                                        int64_t packs_late) try {
  auto cell = std::make_unique<Cell>();
  const auto* rows = reinterpret_cast<const Instruction*>(instructions);
  cell->instructions.assign(rows, rows + instruction_count);
  const auto* numbers = reinterpret_cast<const Constants*>(constants);
  cell->constants.assign(numbers, numbers + instruction_count);
  const auto* shapes = reinterpret_cast<const Register*>(registers);
  cell->registers.assign(shapes, shapes + register_count);
  cell->results.assign(results, results + state_count);
  const auto* segments = reinterpret_cast<const Segment*>(input_segments);
  cell->input_segments.assign(segments, segments + input_segment_count);
  for (int64_t w = 0; w < weight_count; ++w) {
    const void* const* of = weights + 4 * w;
    cell->weights.push_back({static_cast<const int8_t*>(of[0]), static_cast<const float*>(of[1]),
                             static_cast<const int64_t*>(of[2]), static_cast<const float*>(of[3]),
                             weight_inputs[w]});
  }
  cell->packs_late = packs_late != 0;
  cell->prepare();
  return cell.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

extern "C" void torchq_compat_free_cell(const TorchqCompatCell* cell) { delete cell; }

extern "C" int64_t torchq_compat_run_layers(const TorchqCompatCell* const* cells, const int64_t* backward,
                                            int64_t layers, int64_t directions, int64_t steps, int64_t batch,
                                            const int64_t* batch_sizes, const float* x, float* const* states,
                                            float* output, int64_t threads, int64_t work_per_thread) try {
  const int64_t rows =
      batch_sizes ? std::accumulate(batch_sizes, batch_sizes + steps, int64_t{0}) : steps * batch;
  if (rows == 0) return 0;
  std::vector<float> between[2];
  for (int64_t layer = 0; layer < layers; ++layer) {
    int64_t stride = 0;
    for (int64_t d = 0; d < directions; ++d) stride += cells[layer * directions + d]->state_width(0);
    float* to = output;
    if (layer + 1 < layers) {
      between[layer % 2].resize(rows * stride);
      to = between[layer % 2].data();
    }
    float* column = to;
    for (int64_t d = 0; d < directions; ++d) {
      const Cell& cell = *cells[layer * directions + d];
      run_direction(cell, backward[layer * directions + d] != 0, steps, batch, batch_sizes, rows, x, states,
                    column, stride, threads, work_per_thread);
      column += cell.state_width(0);
      states += cell.state_count();
    }
    x = to;
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

extern "C" void torchq_compat_requantize(const double* qparams, float* values, int64_t count) {
  kernels().requantize(Quantizer(qparams_of(qparams)), values, count, values);
}

extern "C" void torchq_compat_to_integers(const double* qparams, const float* values, int64_t count,
                                          void* integers) {
  kernels().to_integers(Quantizer(qparams_of(qparams)), 0, values, count, 1, count,
                        static_cast<uint8_t*>(integers), count);
}

extern "C" uint64_t torchq_compat_sample(const void* data, int64_t size) {
  const char* bytes = static_cast<const char*>(data);
  const int64_t words = size / 8, step = size > TORCHQ_COMPAT_WHOLE_SAMPLE ? words / 32 : 1;
  // Four hashes, none of which waits for another.
  uint64_t hashes[4] = {14695981039346656037u, 1099511628211u, 0x9e3779b97f4a7c15u, 0xc2b2ae3d27d4eb4fu};
  const auto add = [](uint64_t& hash, uint64_t word) {
    hash = (hash ^ word) * 1099511628211u;
    hash ^= hash >> 29;
  };
  const auto word_at = [&](int64_t at, int64_t count) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + 8 * at, count);
    return word;
  };
  int64_t at = 0;
  for (; at + 3 * step < words; at += 4 * step)
    for (int64_t i = 0; i < 4; ++i) add(hashes[i], word_at(at + i * step, 8));
  for (; at < words; at += step) add(hashes[0], word_at(at, 8));
  add(hashes[1], word_at(words, size % 8));
  for (int64_t i = 1; i < 4; ++i) add(hashes[0], hashes[i]);
  return hashes[0];
}

extern "C" void torchq_compat_to_floats(const double* qparams, const void* integers, int64_t count,
                                        float* values) {
  const float scale = static_cast<float>(qparams[0]), zero_point = static_cast<float>(qparams[1]);
  const auto convert = [&](const auto* from) {
    for (int64_t i = 0; i < count; ++i) values[i] = (static_cast<float>(from[i]) - zero_point) * scale;
  };
  if (qparams[2] < 0) {
    convert(static_cast<const int8_t*>(integers));
  } else {
    convert(static_cast<const uint8_t*>(integers));
  }
}

extern "C" const char* torchq_compat_instruction_set(int64_t index) {
  int64_t count;
  const InstructionSet* sets = instruction_sets(&count);
  for (int64_t i = 0; i < count; ++i) {
    if (sets[i].is_here && index-- == 0) return sets[i].kernels->name;
  }
  return nullptr;
}

extern "C" int64_t torchq_compat_use_instruction_set(const char* name) {
  const Kernels* named = kernels_named(name);
  if (!named) return 1;
  chosen_kernels() = named;
  return 0;
}
