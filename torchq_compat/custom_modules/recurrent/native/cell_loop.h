// The cell loop's interface, in C and without torch: recurrent_operator.cpp calls it, and so may other
// engines.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A cell's program with its weights, packed as this CPU wants them. Several threads may run one at once.
typedef struct TorchqCompatCell TorchqCompatCell;

// A cell of arrays as program.py and instruction_set.py describe them, or null where there was no memory.
// Of each linear, `weights` has int8 values, float scales, int64 zero points and float biases, the last three
// or null; they have to outlive the cell, all other arrays need not. `weight_inputs`: how many columns each
// weight has. `input_segments`: a width and the qparams of each segment of columns of x.
TorchqCompatCell* torchq_compat_prepare_cell(const int64_t* instructions, const double* constants,
                                             int64_t instruction_count, const int64_t* registers,
                                             int64_t register_count, const int64_t* results,
                                             int64_t state_count, const void* const* weights,
                                             const int64_t* weight_inputs, int64_t weight_count,
                                             const double* input_segments, int64_t input_segment_count);

void torchq_compat_free_cell(const TorchqCompatCell* cell);

// All layers and directions of a module. Returns 0, or 1 where there was no memory.
//
// cells: of each layer its directions, `directions` of them; `backward`: whether each runs from the last
// step. steps, batch: rows of x, (steps, batch, width). With `batch_sizes`, one for each step and none larger
// than the one before, x and the output are the packed rows of sequences, and `batch` is the first size.
// states: of each cell the array (batch, width) of each state, which is read and then written.
// output: (steps, batch, directions * width of the first state); it may be that state itself in a single
// step. threads: how many there may be; one more for each `work_per_thread` multiply-adds of a step.
int64_t torchq_compat_run_layers(const TorchqCompatCell* const* cells, const int64_t* backward,
                                 int64_t layers, int64_t directions, int64_t steps, int64_t batch,
                                 const int64_t* batch_sizes, const float* x, float* const* states,
                                 float* output, int64_t threads, int64_t work_per_thread);

// The values that `count` floats have behind a quantize-dequantize: scale, zero point, lowest, highest
// integer, and the integer of NaN.
void torchq_compat_requantize(const double* qparams, float* values, int64_t count);

// Floats as 8-bit integers, signed where the lowest is negative, and integers as floats.
void torchq_compat_to_integers(const double* qparams, const float* values, int64_t count, void* integers);
void torchq_compat_to_floats(const double* qparams, const void* integers, int64_t count, float* values);

// Some of the 8-byte words at `data` as one number, all of them where they are few: other weights may come to
// stand where some stood, in storages that say nothing of it.
uint64_t torchq_compat_sample(const void* data, int64_t words);

// The instruction sets that this CPU has kernels for, the best first; null from their count on. Their bits
// are the same.
const char* torchq_compat_instruction_set(int64_t index);

// Which of them cells prepared from now on use; null: the best. Returns 0, or 1 where there is none of the
// name. Without a call, the environment variable TORCHQ_COMPAT_INSTRUCTION_SET has a say.
int64_t torchq_compat_use_instruction_set(const char* name);

#ifdef __cplusplus
}
#endif
