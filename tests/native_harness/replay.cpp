// Runs the calls in a file on every instruction set of this CPU with several numbers of threads:
// replay CALLS RESULTS THREADS... It prints the names of the instruction sets.
//
// A call runs in both directions at once. The results, which must depend on neither, go to a file, to be compared with those of other builds.
// Every array has an allocation of its own size, so that AddressSanitizer sees what is read beside it.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "../../torchq_compat/recurrent/kernel/cell_loop.h"

namespace {

struct Block {
  int64_t bytes = 0;  // negative: a null pointer
  std::unique_ptr<void, decltype(&std::free)> data{nullptr, std::free};

  template <class T>
  const T* as() const {
    return static_cast<const T*>(data.get());
  }
};

void must(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "replay: %s\n", what);
  std::exit(3);
}

Block read_block(FILE* file) {
  Block block;
  must(std::fread(&block.bytes, 8, 1, file) == 1, "the file ends early");
  if (block.bytes < 0) return block;
  block.data.reset(std::malloc(block.bytes ? block.bytes : 1));
  must(std::fread(block.data.get(), 1, block.bytes, file) == static_cast<size_t>(block.bytes),
       "a short block");
  return block;
}

// Every NaN alike: machines, and a vector and its rest, differ in its sign.
void make_alike(std::vector<float>& values) {
  for (float& value : values) {
    if (std::isnan(value)) {
      const uint32_t bits = 0x7fc00000;
      std::memcpy(&value, &bits, 4);
    }
  }
}

void write_values(const std::vector<float>& values, FILE* file) {
  if (values.empty()) return;
  must(std::fwrite(values.data(), 4, values.size(), file) == values.size(), "the results are not written");
}

enum Size { kInstructions, kSlots, kStates, kWeights, kSegments, kSteps, kBatch, kBackward, kSizes };

}  // namespace

int main(int count, char** arguments) {
  must(count >= 4, "usage: replay CALLS RESULTS THREADS...");
  FILE* calls = std::fopen(arguments[1], "rb");
  FILE* results = std::fopen(arguments[2], "wb");
  must(calls && results, "a file cannot be opened");
  int64_t call_count = 0;
  must(std::fread(&call_count, 8, 1, calls) == 1, "no count of calls");
  for (int64_t call = 0; call < call_count; ++call) {
    const Block sizes = read_block(calls);
    const int64_t* size = sizes.as<int64_t>();
    must(sizes.bytes == 8 * kSizes, "sizes");
    const Block instructions = read_block(calls), constants = read_block(calls), slots = read_block(calls),
                to_carry = read_block(calls), inputs = read_block(calls), segments = read_block(calls),
                batch_sizes = read_block(calls), x = read_block(calls);
    std::vector<Block> weights, states;
    for (int64_t w = 0; w < 4 * size[kWeights]; ++w) weights.push_back(read_block(calls));
    for (int64_t s = 0; s < size[kStates]; ++s) states.push_back(read_block(calls));
    std::vector<const void*> weight_pointers;
    std::vector<const float*> state_pointers;
    for (const Block& weight : weights) weight_pointers.push_back(weight.data.get());
    for (const Block& state : states) state_pointers.push_back(state.as<float>());
    const int64_t width = slots.as<int64_t>()[3], rows = x.bytes / 4 / slots.as<int64_t>()[0];
    const int64_t backward[] = {size[kBackward], 1 - size[kBackward]};
    std::vector<std::vector<float>> first;
    // Each instruction set packs weights when the cell is made, and then in each run.
    for (int64_t made = 0; const char* name = torchq_compat_instruction_set(made / 2); ++made) {
      must(torchq_compat_use_instruction_set(name) == 0, "an instruction set is not there");
      std::unique_ptr<TorchqCompatCell, void (*)(TorchqCompatCell*)> cell(
          torchq_compat_prepare_cell(instructions.as<int64_t>(), constants.as<double>(), size[kInstructions],
                                     slots.as<int64_t>(), size[kSlots], to_carry.as<int64_t>(), size[kStates],
                                     weight_pointers.data(), inputs.as<int64_t>(), size[kWeights],
                                     segments.as<double>(), size[kSegments], made % 2),
          [](TorchqCompatCell* each) { torchq_compat_free_cell(each); });
      must(cell != nullptr, "the kernel had no memory");
      // Runs that pack use one thread.
      for (int argument = 3; argument < (made % 2 ? 4 : count); ++argument) {
        const int64_t threads = std::atoll(arguments[argument]);
        const auto run = [&] {
          std::vector<std::vector<float>> found;
          found.emplace_back(rows * 2 * width);
          std::vector<float*> last;
          for (int64_t direction = 0; direction < 2; ++direction) {
            for (const Block& state : states) {
              found.emplace_back(state.as<float>(), state.as<float>() + state.bytes / 4);
            }
          }
          for (size_t s = 1; s < found.size(); ++s) last.push_back(found[s].data());
          const TorchqCompatCell* const cells[] = {cell.get(), cell.get()};
          const int64_t problem = torchq_compat_run_layers(
              cells, backward, 1, 2, size[kSteps], size[kBatch], batch_sizes.as<int64_t>(), x.as<float>(),
              last.data(), found[0].data(), threads, 1);
          must(problem == 0, "the kernel had no memory");
          return found;
        };
        // Twice at once: callers share a prepared cell.
        std::vector<std::vector<float>> found, beside;
        std::thread other([&] { beside = run(); });
        found = run();
        other.join();
        for (std::vector<float>& values : beside) make_alike(values);
        for (std::vector<float>& values : found) make_alike(values);
        if (first.empty()) {
          first = found;
          for (const std::vector<float>& values : found) write_values(values, results);
        }
        for (size_t r = 0; r < found.size(); ++r) {
          const size_t bytes = 4 * found[r].size();
          const bool same = found[r].empty() || (std::memcmp(found[r].data(), first[r].data(), bytes) == 0 &&
                                                 std::memcmp(beside[r].data(), first[r].data(), bytes) == 0);
          if (same) continue;
          std::fprintf(stderr,
                       "replay: call %lld gives other bits on %s with %s threads than on %s with %s\n",
                       static_cast<long long>(call), name, arguments[argument],
                       torchq_compat_instruction_set(0), arguments[3]);
          return 2;
        }
      }
    }
  }
  for (int64_t set = 0; const char* name = torchq_compat_instruction_set(set); ++set) std::puts(name);
  std::fclose(calls);
  must(std::fclose(results) == 0, "the results are not written");
  return 0;
}
