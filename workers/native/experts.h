// A layer of experts for some tokens: products with each expert's weights, its gate, and weighted sums of the answers.

#pragma once

#include <vector>

#include "elementwise.h"
#include "linear.h"

namespace {

// Strides are in elements. A choice is one token's use of one expert, and has the number token * top_k + index.
struct Experts {
  const Element* hidden;  // [token, hidden_size].
  const int32_t* chosen;  // [token, top_k]: numbers of experts, of which those from first_expert on are here.
  const float* factors;   // Factors of the answers, [token, top_k].
  Element *answers, *out;  // Answers to choices, and their weighted sums, [token, hidden_size].
  const Element *const *gate_up, *const *down;  // Packed weights of each expert, as in linear.
  int64_t *loads, *ends, *order;  // Per expert: its total number of choices, and where its part of `order` ends.
  int64_t* next_part;
  int64_t num_tokens, top_k, first_expert, num_experts, hidden_size, inner_size, hidden_stride;
  int64_t gate_up_width, gate_up_stride, down_width, down_stride;

  // Return the index of the expert of a choice, or num_experts if it is not here.
  int64_t expert(int64_t choice) const {
    return std::min<uint64_t>(int64_t(chosen[choice]) - first_expert, num_experts);
  }

  int64_t begin(int64_t expert) const { return expert ? ends[expert - 1] : 0; }
  int64_t num_rows(int64_t expert) const { return ends[expert] - begin(expert); }

  Element* answer(int64_t choice) const { return answers + choice * hidden_size; }
};

// Some choices of an expert, from an index in `order` on.
struct ExpertPart {
  int64_t expert, first, num_rows;
};

// Memory of a thread for some rows of an expert.
struct ExpertRows {
  const Experts& layer;
  Inputs hidden, inner;
  int64_t rows_together;  // Maximum number of rows.

  ExpertRows(const Experts& experts, int64_t num_rows)
      : layer(experts), hidden(num_rows, layer.hidden_size), inner(num_rows, layer.inner_size),
        rows_together(std::min({num_rows, hidden.rows_together, inner.rows_together})) {}

  void answer(const ExpertPart& part) {
    const bool is_large = exceed_cache(layer.num_tokens * layer.top_k, layer.hidden_size);
    answer(part, is_large, [&](int64_t row) { return layer.answer(layer.order[part.first + row]); });
  }

  // Answer some choices of an expert. `out` returns the address of a row's answer. All answers are large or not.
  template <class Out>
  void answer(const ExpertPart& part, bool are_large, Out out) {
    const auto [hidden_size, inner_size] = std::pair(layer.hidden_size, layer.inner_size);
    const int64_t *choices = layer.order + part.first, expert = part.expert;
    hidden.read_from([&](int64_t row) { return layer.hidden + choices[row] / layer.top_k * layer.hidden_stride; },
                     part.num_rows);
    const Linear gate_up = {layer.gate_up[expert], nullptr, layer.gate_up_width, layer.gate_up_stride, hidden_size,
                            inner_size, true};
    gate_up.compute(hidden, part.num_rows, 0, num_blocks(inner_size),
                    [&](int64_t row, int64_t first, const Element* outputs) { inner.put(row, first, outputs); });
    const Linear down = {layer.down[expert], nullptr, layer.down_width, layer.down_stride, inner_size, hidden_size,
                         false};
    down.compute(inner, part.num_rows, 0, num_blocks(hidden_size),
                 [&](int64_t row, int64_t first, const Element* outputs) {
                   store_outputs(outputs, hidden_size - first, are_large, out(row) + first);
                 });
  }
};

std::vector<ExpertPart> parts_of(const Experts& layer, int64_t most_rows) {
  std::vector<ExpertPart> parts;
  for (int64_t expert = 0; expert < layer.num_experts; ++expert) {
    const int64_t count = layer.num_rows(expert), num_parts = round_up(count, most_rows) / most_rows;
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t first = count * part / num_parts, end = count * (part + 1) / num_parts;
      parts.push_back({expert, layer.begin(expert) + first, end - first});
    }
  }
  return parts;
}

// Parts that helpers can take. What helpers are given is a Header, then parts, order, and addresses of weights.
struct SharedExperts {
  struct Header {
    Experts layer;
    int64_t num_parts;
  };

  // Let helpers take parts. Return false if they cannot.
  static bool share(const Experts& layer, const std::vector<ExpertPart>& parts, ExpertRows& rows) {
    const int64_t size = layer.hidden_size, num_choices = layer.num_tokens * layer.top_k;
    const int64_t num_given = sizeof(Header) + parts.size() * sizeof(ExpertPart) + num_choices * sizeof(int64_t) +
                              2 * layer.num_experts * sizeof(Element*);
    const auto memory = (Element*)memory_to_share(layer.num_tokens * size * sizeof(Element), num_given);
    if (!memory) return false;
    for (int64_t token = 0; token < layer.num_tokens; ++token)
      std::copy_n(layer.hidden + token * layer.hidden_stride, size, memory + token * size);
    Header header = {layer, int64_t(parts.size())};
    header.layer.hidden = memory, header.layer.hidden_stride = size;
    Given given;
    given.put(&header, 1);
    given.put(parts.data(), parts.size());
    given.put(layer.order, num_choices);
    given.put(layer.gate_up, layer.num_experts);
    given.put(layer.down, layer.num_experts);
    const auto accept = [&](int64_t index, const float* result) {
      const ExpertPart& part = parts[index];
      for (int64_t row = 0; row < part.num_rows; ++row)
        std::copy_n((const Element*)result + row * size, size, layer.answer(layer.order[part.first + row]));
    };
    const int64_t result_size = rows.rows_together * size * sizeof(Element) / sizeof(float);
    return share_with_helpers({compute_part, given, header.num_parts, result_size},
                              [&](int64_t part) { rows.answer(parts[part]); }, accept);
  }

  static void compute_part(const char* given, int64_t index, float* result) {
    const Header& header = *(const Header*)given;
    Experts layer = header.layer;
    const auto parts = (const ExpertPart*)(given + sizeof header);
    layer.order = (int64_t*)(parts + header.num_parts);
    layer.gate_up = (const Element* const*)(layer.order + layer.num_tokens * layer.top_k);
    layer.down = layer.gate_up + layer.num_experts;
    ExpertRows rows(layer, parts[index].num_rows);
    rows.answer(parts[index], false, [&](int64_t row) { return (Element*)result + row * layer.hidden_size; });
  }
};

}  // namespace

// Choose top_k experts for tokens begin to end by their logits, [token, num_experts], and compute factors: likelihoods,
// or with sum_to_one their shares. Ties go to the lowest number. Unless counted is null, tokens for which it is false
// get the number -1.
extern "C" void EXPORT(choose_experts)(const Element* logits, const bool* counted, int32_t* chosen, float* factors,
                                       int64_t num_experts, int64_t top_k, int64_t sum_to_one, int64_t begin,
                                       int64_t end) {
  std::vector<int32_t> best(top_k + 1);
  for (int64_t token = begin; token < end; ++token) {
    const Element* row = logits + token * num_experts;
    const auto is_less = [&](int32_t a, int32_t b) { return as_float(row[a]) < as_float(row[b]); };
    for (int64_t expert = 0, count = 0; expert < num_experts; ++expert) {
      if (count == top_k && !is_less(best[top_k - 1], expert)) continue;
      int64_t at = count;
      for (; at > 0 && is_less(best[at - 1], expert); --at) best[at] = best[at - 1];
      best[at] = expert;
      count = std::min(count + 1, top_k);
    }
    float sum = 0, *mine = factors + token * top_k;
    const float most = as_float(row[best[0]]);
    if (!sum_to_one)
      for (int64_t expert = 0; expert < num_experts; ++expert) sum += std::exp(as_float(row[expert]) - most);
    for (int64_t i = 0; i < top_k; ++i) {
      mine[i] = std::exp(as_float(row[best[i]]) - most);
      if (sum_to_one) sum += mine[i];
      chosen[token * top_k + i] = counted && !counted[token] ? -1 : best[i];
    }
    for (int64_t i = 0; i < top_k; ++i) mine[i] /= sum;
  }
}

// Sort choices by expert and then by token, and count them.
extern "C" void EXPORT(order_choices)(const Experts* layer) {
  const int64_t num_choices = layer->num_tokens * layer->top_k, num_experts = layer->num_experts;
  std::vector<int64_t> at(num_experts + 2);
  for (int64_t choice = 0; choice < num_choices; ++choice) ++at[layer->expert(choice) + 1];
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    layer->loads[expert] += at[expert + 1];
    layer->ends[expert] = at[expert + 1] += at[expert];
  }
  for (int64_t choice = 0; choice < num_choices; ++choice) layer->order[at[layer->expert(choice)]++] = choice;
  *layer->next_part = 0;
}

// Answer ordered choices. Threads that call this share the parts of the work. Returns 0.
extern "C" int EXPORT(answer_choices)(const Experts* layer) {
  int64_t most_rows = 0;
  for (int64_t expert = 0; expert < layer->num_experts; ++expert)
    most_rows = std::max(most_rows, layer->num_rows(expert));
  if (!most_rows) return 0;
  ExpertRows rows(*layer, most_rows);
  const std::vector<ExpertPart> parts = parts_of(*layer, rows.rows_together);
  if (SharedExperts::share(*layer, parts, rows)) return 0;
  const auto next = [&] { return __atomic_fetch_add(layer->next_part, 1, __ATOMIC_RELAXED); };
  for (int64_t part = next(); part < int64_t(parts.size()); part = next()) rows.answer(parts[part]);
  return 0;
}

// Add up the answers to tokens begin to end.
extern "C" void EXPORT(sum_answers)(const Experts* layer, int64_t begin, int64_t end) {
  const int64_t size = layer->hidden_size;
  std::vector<int64_t> choices(layer->top_k);
  for (int64_t token = begin; token < end; ++token) {
    int64_t count = 0;
    for (int64_t choice = token * layer->top_k; choice < (token + 1) * layer->top_k; ++choice) {
      choices[count] = choice;
      count += layer->expert(choice) < layer->num_experts;
    }
    for (int64_t d = 0; d < size; d += kPairs) {
      Pairs sum = {};
      for (int64_t i = 0; i < count; ++i) {
        const Pairs answer = load(layer->answers + choices[i] * size + d, size - d);
        const vec factor = all(layer->factors[choices[i]]);
        sum.even += answer.even * factor, sum.odd += answer.odd * factor;
      }
      store(layer->out + token * size + d, sum, size - d);
    }
  }
}
