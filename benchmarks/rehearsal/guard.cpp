// Let autograd run on fake CUDA tensors in a PyTorch without CUDA: a device guard that does nothing, and hooks that
// answer that the accelerator is CUDA. Load this library before torch asks for its hooks; then call install_guard().
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

c10::Device gpu() { return c10::Device(CUDA, 0); }

class FakeGuard : public c10::impl::NoOpDeviceGuardImpl<CUDA> {
 public:
  c10::Device getDevice() const override { return gpu(); }
  c10::Device exchangeDevice(c10::Device) const override { return gpu(); }
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  bool queryEvent(void*) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}

 private:
  static c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, gpu()); }
};

class FakeHooks : public at::CUDAHooksInterface {
 public:
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 8; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

extern "C" void install_guard() {
  static FakeGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
}

namespace at {
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, FakeHooks)
}
