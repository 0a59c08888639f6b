// Token ids in JSON: bodies hold thousands of them. simdjson would build a tree of them first.

#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first digit is in the lowest byte of a word");

namespace {

constexpr uint64_t kEach = 0x0101010101010101;

enum class Step { kMore, kEnd, kWrong };

const char* skip_space(const char* at, const char* end) {
  while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
  return at;
}

// Eight characters, or as many as there are, followed by zeros.
uint64_t word_at(const char* at, const char* end) {
  uint64_t word = 0;
  if (end - at >= 8) {
    std::memcpy(&word, at, 8);
  } else {
    std::memcpy(&word, at, end - at);
  }
  return word;
}

// The number of eight digits, one per byte: neighbours are joined to digits of base 100, and these to the number.
uint32_t number_of(uint64_t digits) {
  constexpr uint64_t pairs = 0x000000FF000000FF;
  digits = digits * 10 + (digits >> 8);
  const uint64_t first = (digits & pairs) * (100 + (uint64_t{1000000} << 32));
  const uint64_t second = ((digits >> 16) & pairs) * (1 + (uint64_t{10000} << 32));
  return (first + second) >> 32;
}

// Ids with commas between them.
struct Part {
  const char* at;
  const char* end;
  int32_t* ids;
  int64_t num_ids = 0;

  // Read one id of at most seven digits.
  Step read() {
    at = skip_space(at, end);
    const uint64_t digits = word_at(at, end) ^ 0x30 * kEach;
    // The highest bit of a byte that is no digit is set. Carries reach only bytes after the first such byte.
    const uint64_t others = ((digits + 0x76 * kEach) | digits) & 0x80 * kEach;
    if (others == 0) return Step::kWrong;
    const unsigned num_digits = unsigned(__builtin_ctzll(others)) / 8;
    const bool is_padded = (digits & 0xFF) == 0 && num_digits > 1;
    if (num_digits == 0 || is_padded) return Step::kWrong;
    ids[num_ids++] = number_of(digits << (64 - 8 * num_digits));
    at = skip_space(at + num_digits, end);
    if (at == end) return Step::kEnd;
    return *at++ == ',' ? Step::kMore : Step::kWrong;
  }
};

}  // namespace

// Write the ids of the JSON array text[begin, end). Return their number, or -1 if the array is empty or contains
// anything but integers of at most seven digits. `ids` has space for (end - begin) / 2 of them.
extern "C" int64_t baton_read_ids(const char* text, int64_t begin, int64_t end, int32_t* ids) {
  if (end - begin < 3 || text[begin] != '[' || text[end - 1] != ']') return -1;
  const char* const start = text + begin + 1;
  const char* const stop = text + end - 1;
  // Where an id begins depends on the one before, so a processor is busier with two halves than with one whole.
  const char* const middle = start + (stop - start) / 2;
  const char* const comma = static_cast<const char*>(std::memchr(middle, ',', stop - middle));
  Part first{start, comma ? comma : stop, ids};
  Part second{comma ? comma + 1 : stop, stop, ids + (first.end - start + 1) / 2};
  Step one = Step::kMore, other = comma ? Step::kMore : Step::kEnd;
  while (one == Step::kMore && other == Step::kMore) {
    one = first.read();
    other = second.read();
  }
  while (one == Step::kMore) one = first.read();
  while (other == Step::kMore) other = second.read();
  if (one == Step::kWrong || other == Step::kWrong) return -1;
  std::memmove(ids + first.num_ids, second.ids, second.num_ids * sizeof(*ids));
  return first.num_ids + second.num_ids;
}
