// A cell's program as the loop runs it: instructions are in stages, linears are products with packed weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "cell_kernels.h"

// Columns that can be summed in 32 bits: with both zero points subtracted, 3 * 255 * 128 * 2^14 < 2^31.
constexpr int64_t kSummedColumns = 1 << 14;

// The columns of an instruction table, as in instruction_set.py.
struct Instruction {
  int64_t op, target, a, a_offset, b, b_offset, segments, units, weight, once, quantized;
};

// Rows of floats that an instruction writes; register 0 is x, registers 1 to state_count are the states.
struct Register {
  int64_t width, units, once;

  int64_t segments() const { return width / units; }
  int64_t groups() const { return (units + kLanes - 1) / kLanes; }
  // The number of vectors of a row.
  int64_t vectors() const { return segments() * groups(); }
};

// The scale and zero point of the weight are here if it is quantized per tensor.
struct Constants {
  QParams output, input;
  double weight_scale, weight_zero_point;
};

// Columns of a linear's input with the same qparams. A scale of 0 means floats without qparams.
struct Segment {
  double width;
  QParams qparams;

  bool operator==(const Segment& other) const { return width == other.width && qparams == other.qparams; }
};

struct Weight {
  const int8_t* values;
  const float* scales;         // null: per tensor, see Constants
  const int64_t* zero_points;  // as scales
  const float* bias;           // or null
  int64_t inputs;
};

// What linears read: all rows of a register, as integers, or as floats if they have no 8-bit qparams.
struct Input {
  int64_t source;  // register
  bool once, is_state;
  std::vector<Segment> segments;
  int64_t width;

  bool is_dynamic() const { return segments[0].qparams.is_dynamic(); }
  bool in_floats() const { return segments[0].qparams.scale == 0; }
  // Bytes, or floats, from one row to the next; columns after the last one stay zero.
  int64_t stride() const { return (width + 63) / 64 * 64; }
};

// Linears of one stage that read the same input: their output segments are computed side by side.
struct Product {
  struct Column {
    int64_t instruction, segment;
  };

  int64_t input;
  std::vector<Column> columns;
  // By segment of the input. Weights: for each group of lanes, and for up to `beside` columns at a time,
  // lines of four inputs of each column.
  std::vector<std::vector<Line>> packed;
  std::vector<std::vector<int32_t>> row_sums;
  // By column and lane, as row_sums.
  std::vector<float> scales, biases;
  std::vector<int32_t> zero_points;
  bool has_zero_points = false;

  int64_t column_count() const { return static_cast<int64_t>(columns.size()); }
};

// A register that a stage writes into its tiles, and its other readers.
struct Written {
  int64_t source;               // register
  int64_t at;                   // its first vector in the tile
  bool is_stored = false;       // for a later stage
  std::vector<int64_t> inputs;  // of linears in later stages
  std::vector<int64_t> states;  // states whose new value it is
};

// A register that a stage reads but does not write: read in place, or copied to `at` in the tile.
struct Read {
  int64_t source, at;
};

// Instructions on the same units: a thread runs all of them on one tile of its own units after another.
struct Stage {
  struct Step {
    bool is_product;
    int64_t index;  // of a product, or of an instruction
  };

  bool once;
  int64_t units;
  std::vector<Step> steps;
  std::vector<Product> products;
  std::vector<Written> written;
  std::vector<Read> reads;
  std::vector<int64_t> chosen;  // dynamic inputs that are quantized before the stage
  bool waits = false;           // whether a barrier is before it
  int64_t vectors = 0;          // segments of a tile, each of kTileVectors vectors

  int64_t groups() const { return (units + kLanes - 1) / kLanes; }
};

// The results of an operation for all integers of an 8-bit operand.
struct Table {
  Quantizer of_operand;
  std::vector<Vector> floats;

  const float* data() const { return floats.front().lanes; }
  // Which of the kernels' two sizes it has.
  int64_t size() const { return floats.size() * kLanes > 128; }
};

// The memory that a call writes while it runs; kept for the next call.
struct Scratch;

// Constant after prepare, except the scratch memory.
struct TorchqCompatCell {
  const Kernels* kernels = nullptr;
  std::vector<Instruction> instructions;
  std::vector<Constants> constants;
  std::vector<Quantizer> quantizers;  // of the results
  std::vector<Table> tables;          // by instruction; empty if the instruction is computed
  std::vector<Register> registers;
  std::vector<int64_t> results;  // the register of every new state
  std::vector<Weight> weights;
  std::vector<Segment> input_segments;
  std::vector<Input> inputs;
  std::vector<Stage> once_stages, step_stages;
  std::vector<std::vector<int64_t>> state_inputs;  // for each state, the inputs of linears that read it
  std::vector<int64_t> passed_on;                  // states whose new value no step writes
  std::vector<bool> is_stored;                     // by register
  int64_t weight_size = 0;
  bool packs_late = false;
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<Scratch>> kept;

  TorchqCompatCell();
  ~TorchqCompatCell();

  int64_t state_count() const { return static_cast<int64_t>(results.size()); }
  int64_t state_width(int64_t state) const { return registers[1 + state].width; }
  bool is_state(int64_t index) const { return index >= 1 && index <= state_count(); }
  void prepare();
  void pack(Stage& stage) const;

 private:
  void add(int64_t index);
  Table table_of(size_t index) const;
  void find_readers();
  void find_barriers();
  int64_t input_of(const Instruction& by, const Constants& constant);
  void pack(const Stage& stage, Product& product) const;
};
