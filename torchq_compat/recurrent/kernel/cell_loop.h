// The cell loop's interface, in C and without torch, for recurrent_operator.cpp and other engines.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A cell's program with its weights, packed for this CPU. Several threads may run a cell at the same time.
typedef struct TorchqCompatCell TorchqCompatCell;

// Makes a cell from the arrays that program.py and instruction_set.py describe; null if there is no memory.
// For each linear, `weights` has int8 values, float scales, int64 zero points and float biases; the last
// three may be null. Weights have to outlive the cell, all other arrays need not. `weight_inputs`: the number
// of columns of each weight. `input_segments`: the width and the qparams of each segment of columns of x.
// `packs_late`: whether each run packs weights when it reaches them and frees them then, in one thread; it
// takes longer, in less memory.
TorchqCompatCell* torchq_compat_prepare_cell(const int64_t* instructions, const double* constants,
                                             int64_t instruction_count, const int64_t* registers,
                                             int64_t register_count, const int64_t* results,
                                             int64_t state_count, const void* const* weights,
                                             const int64_t* weight_inputs, int64_t weight_count,
                                             const double* input_segments, int64_t input_segment_count,
                                             int64_t packs_late);

void torchq_compat_free_cell(const TorchqCompatCell* cell);

// Runs all layers and directions of a module. Returns 0, or 1 if there is no memory.
//
// cells: the `directions` cells of each layer; `backward`: whether each runs from the last step to the first.
// steps, batch: sizes of x, (steps, batch, width). With `batch_sizes`, one for each step and none larger than
// the one before, x and the output are the packed rows of sequences, and `batch` is the first size.
// states: for each cell the array (batch, width) of each state, which is read and then written.
// output: (steps, batch, directions * width of the first state); for a single step it may be the first state
// itself. threads: the most threads to use; one for each `work_per_thread` multiply-adds of a step.
int64_t torchq_compat_run_layers(const TorchqCompatCell* const* cells, const int64_t* backward,
                                 int64_t layers, int64_t directions, int64_t steps, int64_t batch,
                                 const int64_t* batch_sizes, const float* x, float* const* states,
                                 float* output, int64_t threads, int64_t work_per_thread);

// Quantizes and dequantizes `count` floats in place. qparams: scale, zero point, lowest and highest integer,
// and the integer of NaN.
void torchq_compat_requantize(const double* qparams, float* values, int64_t count);

// Convert floats to 8-bit integers, signed if the lowest integer is negative, and integers to floats.
void torchq_compat_to_integers(const double* qparams, const float* values, int64_t count, void* integers);
void torchq_compat_to_floats(const double* qparams, const void* integers, int64_t count, float* values);

// Returns a hash of the `size` bytes at `data`, or of some of them if they are more than this. It detects other
// weights at the address of earlier ones, in storages that do not show the change.
#define TORCHQ_COMPAT_WHOLE_SAMPLE 8192
uint64_t torchq_compat_sample(const void* data, int64_t size);

// Returns the name of an instruction set that this CPU can use, the best first; null if `index` is not less
// than their number. All compute the same bits.
const char* torchq_compat_instruction_set(int64_t index);

// Chooses the instruction set of cells prepared from now on; null: the best. Returns 0, or 1 if there is none
// of this name. Without a call, the environment variable TORCHQ_COMPAT_INSTRUCTION_SET chooses it.
int64_t torchq_compat_use_instruction_set(const char* name);

#ifdef __cplusplus
}
#endif
