// Bytes of K/V pages: between pages, between pages and images of them, and single tokens to other places. Stored bytes are
// moved as they are, whatever numbers they mean.
//
// An entry is a page, an image or a token: the addresses of its K and of its V in layer 0, head 0. Layers and heads follow in
// fixed steps, `n` rows of one head lie behind each other. K is plane 0, V is plane 1.
#include "portable.cuh"

constexpr int MOST_ENTRIES = 64;

struct Entries {
    u64 from[2][MOST_ENTRIES], to[2][MOST_ENTRIES];
};

struct Steps {
    u64 layer[2], head[2];
};

// One block copies the rows of one head, layer and plane of one entry. T: the widest word that divides sizes and addresses.
template <typename T>
DEVICE void copy_entry(const Entries& entries, const Steps& from, const Steps& to, int n_head, int n_bytes) {
    const int plane = blockIdx.z, entry = blockIdx.y, layer = blockIdx.x / n_head, head = blockIdx.x % n_head;
    const u64 source_at = entries.from[plane][entry] + layer * from.layer[plane] + head * from.head[plane];
    const u64 target_at = entries.to[plane][entry] + layer * to.layer[plane] + head * to.head[plane];
    const T* __restrict__ source = reinterpret_cast<const T*>(source_at);
    T* __restrict__ target = reinterpret_cast<T*>(target_at);
    const int n = n_bytes / static_cast<int>(sizeof(T));
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += blockDim.x) target[i] = source[i];
}

// Grid: (layers * heads, entries, 2).
extern "C" __global__ void __launch_bounds__(256)
pages_copy_wide(const __grid_constant__ Entries entries, const __grid_constant__ Steps from, const __grid_constant__ Steps to,
                int n_head, int k_bytes, int v_bytes) {
    copy_entry<uint4>(entries, from, to, n_head, blockIdx.z == 0 ? k_bytes : v_bytes);
}

extern "C" __global__ void __launch_bounds__(256)
pages_copy_narrow(const __grid_constant__ Entries entries, const __grid_constant__ Steps from, const __grid_constant__ Steps to,
                  int n_head, int k_bytes, int v_bytes) {
    copy_entry<u16>(entries, from, to, n_head, blockIdx.z == 0 ? k_bytes : v_bytes);
}

// Tokens to other places; places may be sources and targets at once, so all are read before one is written. One block has all
// tokens of one head, layer and plane: nothing that another block reads or writes. Grid: (layers * heads, 2).
template <typename T>
DEVICE void move_tokens(const Entries& entries, const Steps& steps, int n_entries, int n_head, int row_bytes, T* held) {
    const int plane = blockIdx.y, layer = blockIdx.x / n_head, head = blockIdx.x % n_head;
    const u64 offset = layer * steps.layer[plane] + head * steps.head[plane];
    const int row = row_bytes / static_cast<int>(sizeof(T));
    for (int i = threadIdx.x; i < n_entries * row; i += blockDim.x)
        held[i] = reinterpret_cast<const T*>(entries.from[plane][i / row] + offset)[i % row];
    __syncthreads();
    for (int i = threadIdx.x; i < n_entries * row; i += blockDim.x)
        reinterpret_cast<T*>(entries.to[plane][i / row] + offset)[i % row] = held[i];
}

extern "C" __global__ void __launch_bounds__(256)
pages_move_wide(const __grid_constant__ Entries entries, const __grid_constant__ Steps steps, int n_entries, int n_head,
                int k_row, int v_row) {
    extern __shared__ uint4 shared_words[];
    move_tokens<uint4>(entries, steps, n_entries, n_head, blockIdx.y == 0 ? k_row : v_row, shared_words);
}

extern "C" __global__ void __launch_bounds__(256)
pages_move_narrow(const __grid_constant__ Entries entries, const __grid_constant__ Steps steps, int n_entries, int n_head,
                  int k_row, int v_row) {
    extern __shared__ uint4 shared_words[];
    move_tokens<u16>(entries, steps, n_entries, n_head, blockIdx.y == 0 ? k_row : v_row, reinterpret_cast<u16*>(shared_words));
}
