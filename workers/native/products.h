// Sums of products of groups of rows whose sums fit into registers. The file that includes this one defines
// add_products for a group.

#pragma once

namespace {

constexpr int64_t kDepth = 512;  // Inputs whose weights stay in the cache until all rows have met them.

constexpr decltype(&add_products<1>) kAddProducts[] = {add_products<1>, add_products<2>, add_products<3>,
                                                       add_products<4>, add_products<5>, add_products<6>};

// Compute the sums of some rows, and give each row's to `store`. Of several groups of rows, only the first would wait
// for memory: two of them each fetch half of the weights that come next. A single group waits for memory all the time.
template <class Store>
void sum_products(const Inputs& x, const Outputs& weight, int64_t num_rows, int64_t num_inputs, Store store) {
  alignas(64) float sums[Inputs::rows_together * kOutputs];
  const int64_t num_groups = round_up(num_rows, kMostTogether) / kMostTogether;
  std::fill(sums, sums + num_rows * kOutputs, 0.0f);
  for (int64_t i = 0; i < num_inputs; i += kDepth)
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t row = num_rows * group / num_groups, next = num_rows * (group + 1) / num_groups;
      const int64_t depth = std::min(kDepth, num_inputs - i);
      const int64_t ahead = num_groups > 1 ? depth / 2 * weight.pair_stride + group % kLines * kLine : 0;
      kAddProducts[next - row - 1](x.rows + row * x.stride, x.stride, weight, i, depth, ahead, sums + row * kOutputs);
    }
  for (int64_t row = 0; row < num_rows; ++row) store(row, sums + row * kOutputs);
}

}  // namespace
