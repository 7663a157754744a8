// All kernels of one tier. Compiled once per tier with -DDIPTYCH_TIER=<name> and that tier's
// instruction set; shared/kernels/build.py holds the list.
#include "layer.h"

namespace diptych {
namespace DIPTYCH_TIER {

#define DIPTYCH_TEXT_OF(x) #x
#define DIPTYCH_TEXT(x) DIPTYCH_TEXT_OF(x)

extern const Kernels kernels;
const Kernels kernels = {
    DIPTYCH_TEXT(DIPTYCH_TIER),
    kTileRows,
    run_prepare,
    run_linear,
    run_rms_norm,
    run_silu_mul,
    run_write_kv,
    convert_rows,
    run_attention,
    run_stack,
    run_head,
};

}  // namespace DIPTYCH_TIER
}  // namespace diptych
