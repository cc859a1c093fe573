// Runs an AOTInductor package of a converted model, without Python.
// run_package LIBRARY PACKAGE OUTPUT STEPS BATCH WIDTH: the first result goes to OUTPUT as raw floats.

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <fstream>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << '\n';
    return 3;
  }
  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  const int64_t steps = std::atoll(argv[4]), batch = std::atoll(argv[5]), width = std::atoll(argv[6]);
  const at::Tensor numbers = at::arange(steps * batch * width, at::kFloat);
  const at::Tensor x = numbers.mul(7).remainder(33).div(16).sub(1).view({steps, batch, width});
  const at::Tensor result = model.run({x})[0].contiguous();
  std::ofstream(argv[3], std::ios::binary)
      .write(static_cast<const char*>(result.const_data_ptr()), result.nbytes());
}
