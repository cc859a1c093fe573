// Chains: operators of a lowered graph that run one after the other, as one call. Between two operators Python and
// torch's dispatcher take as long as a small kernel. lower/integers/chains.py writes the text of a chain; it has
// numbers alone, and is given its tensors in each call.

#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stable_tensors.h"

// In recurrent_operator.cpp.
std::vector<Tensor> recurrent_bound(const Tensor& x, const std::vector<Tensor>& states, int64_t ticket, bool batch_first,
                                    int64_t work_per_thread);

namespace chains {

using Sizes = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;

// The values of a call: the given tensors, then the results of the operators; and the given sizes.
struct Values {
  std::vector<std::optional<Tensor>> tensors;
  const Sizes& sizes;
};

using Step = std::function<void(Values&)>;
constexpr size_t kMostArguments = 16;

// Reads the text of a chain: words between spaces.
class Text {
 public:
  explicit Text(const std::string& text) : words_(text) {}
  bool next(std::string& word) { return static_cast<bool>(words_ >> word); }
  std::string word() {
    std::string word;
    check(next(word), "the text of a chain ends early");
    return word;
  }
  int64_t integer() { return std::stoll(word()); }

 private:
  std::istringstream words_;
};

// An integer, or the place of a size.
class Integer {
 public:
  explicit Integer(const std::string& word) : is_size_(word[0] == 's'), value_(std::stoll(word.substr(1))) {}
  int64_t in(const Values& values) const { return is_size_ ? values.sizes[value_] : value_; }

 private:
  bool is_size_;
  int64_t value_;
};

// One argument: how it is read from the text, and its value in a call.
template <typename T>
struct Argument;

// The place of a tensor; or a number, which becomes a tensor without dimensions.
template <>
struct Argument<Tensor> {
  explicit Argument(Text& text) {
    const std::string word = text.word();
    if (word[0] == 't') {
      place = std::stoll(word.substr(1));
    } else {
      number = word[0] == 'f' ? number_of(std::strtod(word.c_str() + 1, nullptr), aoti_torch_dtype_float64())
                              : number_of(std::stoll(word.substr(1)), aoti_torch_dtype_int64());
    }
  }
  template <typename T>
  static Tensor number_of(T value, int32_t dtype) {
    AtenTensorHandle made = nullptr;
    check_call_of_torch(aoti_torch_empty_strided(0, nullptr, nullptr, dtype, aoti_torch_device_type_cpu(), 0, &made));
    const Tensor number(made);
    *static_cast<T*>(number.mutable_data_ptr()) = value;
    return number;
  }
  const Tensor& in(const Values& values) const { return number ? *number : *values.tensors[place]; }
  size_t place = 0;
  std::optional<Tensor> number;
};

template <>
struct Argument<std::optional<Tensor>> {
  explicit Argument(Text& text) {
    const std::string word = text.word();
    if (word != "none") place = std::stoll(word.substr(1));
  }
  const std::optional<Tensor>& in(const Values& values) const {
    static const std::optional<Tensor> kNone;
    return place ? values.tensors[*place] : kNone;
  }
  std::optional<size_t> place;
};

template <>
struct Argument<int64_t> {
  explicit Argument(Text& text) : value(text.word()) {}
  int64_t in(const Values& values) const { return value.in(values); }
  Integer value;
};

template <>
struct Argument<double> {
  explicit Argument(Text& text) : value(std::strtod(text.word().c_str() + 1, nullptr)) {}
  double in(const Values&) const { return value; }
  double value;
};

template <>
struct Argument<bool> {
  explicit Argument(Text& text) : value(text.word() == "b1") {}
  bool in(const Values&) const { return value; }
  bool value;
};

template <>
struct Argument<std::string> {
  explicit Argument(Text& text) : value(text.word()) {}
  const std::string& in(const Values&) const { return value; }
  std::string value;
};

template <>
struct Argument<ScalarType> {
  explicit Argument(Text& text) {
    static const std::unordered_map<std::string, ScalarType> kNames{
        {"float32", ScalarType::Float}, {"float64", ScalarType::Double}, {"int64", ScalarType::Long},
        {"int32", ScalarType::Int},     {"bool", ScalarType::Bool}};
    value = kNames.at(text.word());
  }
  ScalarType in(const Values&) const { return value; }
  ScalarType value;
};

template <>
struct Argument<Sizes> {
  explicit Argument(Text& text) {
    const int64_t count = std::stoll(text.word().substr(1));
    for (int64_t i = 0; i < count; ++i) values.emplace_back(text.word());
  }
  Sizes in(const Values& given) const {
    Sizes result;
    result.reserve(values.size());
    for (const Integer& each : values) result.push_back(each.in(given));
    return result;
  }
  std::vector<Integer> values;
};

// Which results of an operator have places: (position, place).
using Taken = std::vector<std::pair<size_t, size_t>>;

Taken taken_of(Text& text) {
  Taken taken;
  for (int64_t count = text.integer(); count > 0; --count) {
    const auto position = static_cast<size_t>(text.integer());
    taken.emplace_back(position, text.integer());
  }
  return taken;
}

// The step that calls `f`, one of the own operators.
template <typename... Arguments>
Step step_of(Tensor (*f)(Arguments...), Text& text) {
  std::tuple<Argument<std::decay_t<Arguments>>...> arguments{Argument<std::decay_t<Arguments>>(text)...};
  const size_t place = taken_of(text).at(0).second;
  return [f, place, arguments = std::move(arguments)](Values& values) {
    values.tensors[place] = std::apply([&](const auto&... each) { return f(each.in(values)...); }, arguments);
  };
}

using Value = std::function<StableIValue(const Values&)>;

template <typename T>
Value value_of(Text& text, bool is_optional) {
  Argument<T> argument(text);
  using torch::stable::detail::from;
  if (is_optional) return [=](const Values& values) { return from(std::optional<T>(argument.in(values))); };
  return [=](const Values& values) { return from(argument.in(values)); };
}

// An argument of an operator of torch: its kind, with ? if it may be None, and its value.
Value value_for_torch(Text& text) {
  const std::string kind = text.word();
  const bool is_optional = kind.size() > 1;
  switch (kind[0]) {
    case 'N': return [](const Values&) { return torch::stable::detail::from(std::nullopt); };
    case 'T': return value_of<Tensor>(text, is_optional);
    case 'I': return value_of<int64_t>(text, is_optional);
    case 'F': return value_of<double>(text, is_optional);
    case 'B': return value_of<bool>(text, is_optional);
    case 'S': return value_of<Sizes>(text, is_optional);
    case 'D': return value_of<ScalarType>(text, is_optional);
    case 'W': return value_of<std::string>(text, is_optional);
    case 'L': {
      const Argument<Sizes> places(text);
      return [=](const Values& values) {
        Tensors tensors;
        for (const int64_t place : places.in(values)) tensors.push_back(*values.tensors[place]);
        return torch::stable::detail::from(tensors);
      };
    }
    default: refuse("an argument of a chain is of no kind that is known");
  }
}

Step step_of_torch(const std::string& name, Text& text) {
  const std::string overload = text.word();
  std::vector<Value> arguments;
  for (int64_t count = text.integer(); count > 0; --count) arguments.push_back(value_for_torch(text));
  const auto tensors = static_cast<size_t>(text.integer());  // that it returns; 0: a list
  check(std::max(arguments.size(), tensors) <= kMostArguments, "an operator in a chain has too many arguments");
  return [=, taken = taken_of(text), overload = overload == "default" ? "" : overload](Values& values) {
    std::array<StableIValue, kMostArguments> stack;
    for (size_t i = 0; i < arguments.size(); ++i) stack[i] = arguments[i](values);
    check_call_of_torch(torch_call_dispatcher(name.c_str(), overload.c_str(), stack.data(), TORCH_ABI_VERSION));
    using torch::stable::detail::to;
    Tensors results;
    if (tensors == 0) results = to<Tensors>(stack[0]);
    for (size_t i = 0; i < tensors; ++i) results.push_back(to<Tensor>(stack[i]));
    for (const auto& [position, place] : taken) values.tensors[place] = results.at(position);
  };
}

// A call of a recurrent module, whose ticket is one of the sizes.
Step step_of_recurrent(Text& text) {
  const Argument<Tensor> x(text);
  const Argument<Sizes> states(text);
  const Argument<int64_t> ticket(text);
  const Argument<bool> batch_first(text);
  const Argument<int64_t> work_per_thread(text);
  return [=, taken = taken_of(text)](Values& values) {
    Tensors at_start;
    for (const int64_t place : states.in(values)) at_start.push_back(*values.tensors[place]);
    const Tensors results = recurrent_bound(x.in(values), at_start, ticket.in(values), batch_first.in(values),
                                            work_per_thread.in(values));
    for (const auto& [position, place] : taken) values.tensors[place] = results.at(position);
  };
}

// Makes the step of an own operator, if there is one of this name.
using OwnSteps = std::unordered_map<std::string, Step (*)(Text&)>;

class Chain {
 public:
  // The text: how many tensors it is given, how many it has, and how many sizes it is given; for each operator its
  // name, its arguments, which of its results have places, and the places of tensors that nothing reads later; "end",
  // and the places of the chain's results.
  Chain(const std::string& given, const OwnSteps& own) {
    Text text(given);
    given_ = text.integer(), places_ = text.integer(), sizes_ = text.integer();
    for (std::string name = text.word(); name != "end"; name = text.word()) {
      const auto found = own.find(name);
      steps_.push_back(name == "recurrent"  ? step_of_recurrent(text)
                       : found != own.end() ? found->second(text)
                                            : step_of_torch(name, text));
      std::vector<size_t> unread;
      for (int64_t count = text.integer(); count > 0; --count) unread.push_back(text.integer());
      unread_.push_back(std::move(unread));
    }
    for (std::string word; text.next(word);) results_.push_back(std::stoll(word));
  }

  Tensors run(const Tensors& tensors, const Sizes& sizes) const {
    check(tensors.size() == given_ && sizes.size() == sizes_, "a chain is given other values");
    Values values{{}, sizes};
    values.tensors.reserve(places_);
    values.tensors.assign(tensors.begin(), tensors.end());
    values.tensors.resize(places_);
    for (size_t i = 0; i < steps_.size(); ++i) {
      steps_[i](values);
      for (const size_t place : unread_[i]) values.tensors[place].reset();
    }
    Tensors results;
    for (const size_t place : results_) results.push_back(*values.tensors[place]);
    return results;
  }

 private:
  size_t given_, places_, sizes_;
  std::vector<Step> steps_;
  std::vector<std::vector<size_t>> unread_;
  std::vector<size_t> results_;
};

// The chains of this process by their numbers.
class Chains {
 public:
  int64_t add(const std::string& text, const OwnSteps& own) {
    auto chain = std::make_shared<const Chain>(text, own);
    const std::lock_guard<std::mutex> guard(lock_);
    all_[++last_] = std::move(chain);
    return last_;
  }
  std::shared_ptr<const Chain> at(int64_t number) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = all_.find(number);
    check(found != all_.end(), "there is no such chain");
    return found->second;
  }
  void forget(int64_t number) {
    const std::lock_guard<std::mutex> guard(lock_);
    all_.erase(number);
  }

 private:
  std::mutex lock_;
  int64_t last_ = 0;
  std::unordered_map<int64_t, std::shared_ptr<const Chain>> all_;
};

// A loop over time whose step is a chain: which of the chain's tensors are states, and which are parts of wholes.
struct Loop {
  const Sizes& roles;    // for each given tensor: 0, 1 + the number of a state, or -1 - the number of a whole
  const Sizes& outputs;  // for each new state, then each value of a step: a result, or -1 - a given tensor
  const Sizes& dims;     // for each whole the dimension of the steps; below 0: -1 - it, from the last to the first
  const Sizes& stacked;  // for each value the dimension along which those of all steps are stacked
};

Tensor part_of(const Tensor& whole, int64_t dim, int64_t step) {
  const bool is_backward = dim < 0;
  dim = is_backward ? -1 - dim : dim;
  return call("aten::select", "int", whole, dim, is_backward ? whole.size(dim) - 1 - step : step);
}

// Runs a step for each part of the wholes; returns the last states, and the stacked values.
Tensors run_loop(const Chain& step, const Tensors& tensors, const Sizes& sizes, const Tensors& wholes,
                 int64_t steps, const Loop& loop) {
  check(loop.roles.size() == tensors.size() && loop.dims.size() == wholes.size(), "a loop has other tensors");
  Tensors given = tensors;
  const size_t states = loop.outputs.size() - loop.stacked.size();
  std::vector<Tensors> values(loop.stacked.size());
  Tensors now;
  for (int64_t t = 0; t < steps; ++t) {
    for (size_t i = 0; i < given.size(); ++i) {
      if (loop.roles[i] < 0) given[i] = part_of(wholes[-1 - loop.roles[i]], loop.dims[-1 - loop.roles[i]], t);
      if (loop.roles[i] > 0 && t > 0) given[i] = now[loop.roles[i] - 1];
    }
    const Tensors results = step.run(given, sizes);
    Tensors next;
    for (size_t i = 0; i < loop.outputs.size(); ++i) {
      const Tensor& output = loop.outputs[i] < 0 ? given[-1 - loop.outputs[i]] : results[loop.outputs[i]];
      if (i >= states) {
        values[i - states].push_back(output);
        continue;
      }
      // The sizes that the chain is given are those of the first step.
      check(t == 0 || std::ranges::equal(output.sizes(), now[i].sizes()), "a state of a loop changes its shape");
      next.push_back(output);
    }
    now = std::move(next);
  }
  for (size_t v = 0; v < values.size(); ++v) now.push_back(call("aten::stack", "", values[v], loop.stacked[v]));
  return now;
}

}  // namespace chains
