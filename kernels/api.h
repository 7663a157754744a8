// Plain data and entry points shared by all translation units. No torch here: the same code is
// linked into the torch extension and into the stand-alone self test.
//
// Vocabulary
//   token   one row of the packed batch; `tokens` rows belong to `seqs` sequences in order.
//   slot    block * block_size + offset: one token's place in a KV pool.
//   tier    one instruction set level; tier.cpp is compiled once per tier (see dispatch.cpp).
//   crew    the threads that run one call together, all inside the same function.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace diptych {

// Element type of a tensor in memory; I8 in KV pools only.
enum class Store : int { F32 = 0, BF16 = 1, F16 = 2, I8 = 3 };
// arithmetic of a linear layer
enum class Kind : int { F32 = 0, BF16 = 1, I8 = 2, I8A16 = 3, I4 = 4, I4A16 = 5 };

inline long store_bytes(Store s) { return s == Store::F32 ? 4 : s == Store::I8 ? 1 : 2; }

// Bytes of one token's K or V of one head in a pool. I8: `dim` integers, then their fp32 scale
// (inline at the tail of each row, as vLLM's int8_per_token_head has it).
constexpr long kScaleBytes = 4;
constexpr long kMaxIntegerDim = 2048;  // of keys: their products are added as 32-bit integers
inline long head_bytes(Store s, long dim) {
  return dim * store_bytes(s) + (s == Store::I8 ? kScaleBytes : 0);
}

// ---------------------------------------------------------------- threads (team.cpp)

struct alignas(64) Team {
  alignas(64) int arrived = 0;
  alignas(64) int round = 0;
  alignas(64) long counter = 0;
  int threads = 1;
};

struct Crew {
  Team* team;
  int tid;
  int threads;
  long next() const;  // the next unit of work of this phase, over all threads: 0, 1, 2, …
  void sync() const;  // wait for all threads; makes writes visible, restarts next() at 0
};

using CrewBody = void (*)(const Crew&, void* context);
void run_crew(int threads, CrewBody body, void* context);
// Crews of the calling thread are `own` threads from now on, which run where they always did, and one
// pinned to each of `cpus`. False, and only `own` of them, where that many threads or CPUs are not to be had.
bool place_crew(int own, const int64_t* cpus, int count);

// ---------------------------------------------------------------- linear layers

// Columns are packed in blocks of 32. One step of a block holds, for each of its 32 columns,
// the 4 bytes of weights of consecutive inputs (1 fp32, 2 bf16 or 4 int8): 128 bytes. A block
// is `steps` steps; blocks follow one another.
//
// int8 has one scale per column and group of 32 inputs, the last group filled up with zeros.
// Weights are stored as value + 128 (u8), and a block is, for each group, its 8 steps and then
// the fp16 scales of the 32 columns.
//
// int4 has two numbers per column and group: weight = scale * q + least, q 0 … 15. A block is, for
// each group, 4 double steps – of every byte, the low 4 bits are q of the first step, the high ones
// of the second – and then the fp16 scales and the fp16 least values of the 32 columns.
constexpr long kBlockCols = 32;
constexpr long kStepBytes = kBlockCols * 4;
constexpr long kGroup = 32;
constexpr long kGroupSteps = kGroup / 4;
constexpr long kGroupBytes = kGroupSteps * kStepBytes + kBlockCols * 2;
constexpr long kInt4Bytes = kGroupSteps / 2 * kStepBytes + kBlockCols * 4;  // one group of int4

inline bool is_int8(Kind k) { return k == Kind::I8 || k == Kind::I8A16; }
inline bool is_int4(Kind k) { return k == Kind::I4 || k == Kind::I4A16; }
inline bool is_grouped(Kind k) { return is_int8(k) || is_int4(k); }
inline long step_inputs(Kind k) { return k == Kind::F32 ? 1 : k == Kind::BF16 ? 2 : 4; }
inline long groups_of(long inputs) { return (inputs + kGroup - 1) / kGroup; }
inline long steps_of(Kind k, long inputs) {
  return is_grouped(k) ? groups_of(inputs) * kGroupSteps
                       : (inputs + step_inputs(k) - 1) / step_inputs(k);
}
inline long block_bytes(Kind k, long inputs) {
  if (!is_grouped(k)) return steps_of(k, inputs) * kStepBytes;
  return groups_of(inputs) * (is_int4(k) ? kInt4Bytes : kGroupBytes);
}
inline long blocks_of(long outputs) { return (outputs + kBlockCols - 1) / kBlockCols; }

// Activations of int8 and int4 are quantised symmetrically per row and group, I8 and I4 to 8 bits,
// I8A16 and I4A16 to 16 bits = 256 * (a plane of int8) + (a plane of int8). A row is its planes,
// then per group an fp32 scale, then per group 4 bytes: for int8 the int32 offset -128 * (sum of
// the group's integers), for int4 the fp32 sum of the group's rounded values.
inline long planes_of(Kind k) { return k == Kind::I8A16 || k == Kind::I4A16 ? 2 : 1; }
// Bytes of an activation row in the arithmetic of `k` that are read, a multiple of 64; padding is zero.
inline long used_row_bytes(Kind k, long inputs) {
  long bytes = is_grouped(k) ? groups_of(inputs) * (planes_of(k) * kGroup + 8)
                             : steps_of(k, inputs) * 4;
  return (bytes + 63) / 64 * 64;
}
// Bytes from row to row. Tiles read a line of many rows at once: bf16 rows whose distance is a multiple
// of 512 bytes would meet in few sets of the cache, so they lie one line further apart.
inline long row_bytes(Kind k, long inputs) {
  long bytes = used_row_bytes(k, inputs);
  return k == Kind::BF16 && bytes % 512 == 0 ? bytes + 64 : bytes;
}

struct Linear {
  Kind kind;
  long outputs, inputs;
  const uint8_t* packed;  // [blocks][block_bytes(kind, inputs)]
  const float* bias;      // [blocks * 32] or null
};

// Activations ready for a linear of kind `kind`.
struct Rows {
  Kind kind;
  uint8_t* data;  // [rows][row_bytes(kind, inputs)]
};

// What happens to a tile of results.
//   Write  out[row][col] = y              Add  out[row][col] += y (out is fp32)
//   Gate   weights come as 16 gate and 16 up columns per block; out[row][col] of half the
//          columns = silu(gate) * up
enum class Finish : int { Write, Add, Gate };
struct Output {
  Finish finish;
  Store store;
  void* data;
  long stride;  // elements between rows
  long cols;    // columns that exist (after halving for Gate)
  char* notes = nullptr;  // of Write in fp32: [threads][rows][kNoteBytes], see best.h
};
constexpr long kNoteBytes = 320;  // of a row, by one thread

// ---------------------------------------------------------------- rows

struct Norm {
  const float* weight;
  float eps;
};

struct Matrix {  // fp32, bf16 or fp16 rows with unit stride inside a row
  Store store;
  void* data;
  long stride;  // elements between rows
};

// ---------------------------------------------------------------- attention

struct Pool {  // one layer's KV: [num_blocks][block_size][kv_heads][head_bytes], contiguous
  Store store;
  char* k;
  char* v;
  long num_blocks, block_size, kv_heads, k_dim, v_dim;
};

// Sequence s owns rows query_start[s] … query_start[s + 1]; its last row sees context[s] keys,
// itself included. tables[s * table_stride + i] is its i-th block.
struct Batch {
  long seqs, tokens;
  const int32_t* tables;
  long table_stride;
  const int32_t* query_start;
  const int32_t* context;
};

// One piece of attention work, for every KV head. Decode: keys [first, last) of a one-token
// sequence; `partial` is -1 where this is the whole context, else the index of its partial
// result. Prefill: query rows [first, last) of the packed batch.
struct Item {
  int32_t seq, first, last, partial;
};
struct Merge {  // decode sequence `seq` is the sum of `count` partial results from `partial` on
  int32_t seq, partial, count;
};
struct Plan {
  const Item* decodes;
  long num_decodes;
  const Item* prefills;
  long num_prefills;
  const Merge* merges;
  long num_merges;
  long num_partials;
};

struct Attention {
  Pool pool;
  long heads;
  const void* q;  // [tokens][heads][k_dim] with strides in elements
  Store q_store;
  long q_token, q_head;
  void* out;  // [tokens][heads][v_dim], contiguous
  Store out_store;
  float scaling;
  float softcap;       // 0: none
  long window;         // 0: none; else keys > query - window
  const float* sinks;  // [heads] or null
};

// ---------------------------------------------------------------- fused decoder layers

struct LayerWeights {
  Norm attention_norm, mlp_norm;
  Linear qkv, o, gate_up, down;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float head_eps;
  long window;
};

struct StackShape {
  long hidden, heads, kv_heads, head_dim, inter, rotary;
  float scaling;
};

struct StackCall {
  StackShape shape;
  Batch batch;
  const LayerWeights* layers;  // `count` of each
  const Pool* pools;
  const Plan* const* plans;
  long count;
  float* x;          // [tokens][hidden], updated in place
  const float* cos;  // [tokens][rotary / 2]
  const float* sin;
  char* scratch;  // stack_sizes' total of bytes, 64-byte aligned
  int threads;    // at most as many run this
  bool kv_only = false;  // of one layer: keys and values are written, and x stays as it is
};

struct HeadCall {  // logits of chosen rows: final norm and output projection
  const float* x;
  long hidden;
  const int64_t* rows;
  long count;
  Norm norm;
  Linear linear;
  float* logits;  // [count][outputs]
  int64_t* best;  // [count]: the first of a row's best tokens, -1 where one is not finite
  int threads;    // at most as many run this
  char* scratch;
};

// ---------------------------------------------------------------- what a tier offers

struct Kernels {
  const char* name;
  long tile_rows;
  // Quantise or convert `rows` rows of `in`, after RMS norm where `norm` is given.
  void (*prepare)(const Crew&, const Matrix& in, long rows, long inputs, const Norm* norm,
                  const Rows& out);
  void (*linear)(const Crew&, const Linear&, const Rows&, long rows, const Output&);
  void (*rms_norm)(const Crew&, const Matrix& in, const Matrix& out, long rows, long width,
                   const Norm&);
  void (*silu_mul)(const Crew&, const Matrix& gate, const Matrix& up, const Matrix& out,
                   long rows, long width);
  void (*write_kv)(const Crew&, const Pool&, const int64_t* slots, long tokens, const Matrix& k,
                   long k_head, const Matrix& v, long v_head);
  // One thread's: rows of a pool as a pool of another element type holds them.
  void (*convert)(Store from, const char* in, Store to, char* out, long rows, long dim);
  void (*attention)(const Crew&, const Attention&, const Batch&, const Plan&, char* scratch);
  void (*stack)(const Crew&, const StackCall&);
  void (*head)(const Crew&, const HeadCall&);
};

const Kernels* best_kernels();                 // chosen once by cpuid
const Kernels* find_kernels(const char* name); // null where absent or the CPU cannot run it

}  // namespace diptych
