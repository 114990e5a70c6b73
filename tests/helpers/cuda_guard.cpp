// Torch's CPU build has no device guard for CUDA. Fake CUDA tensors need one; this one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
