// A CUDA device whose memory is the host's and whose kernels are the CPU's; see README.md. With -DFAKE_MPS, an Apple GPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ApproximateClock.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <set>

namespace py = pybind11;
using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

#ifdef FAKE_MPS
#define BACKEND MPS
using HooksInterface = at::MPSHooksInterface;
#else
#define BACKEND CUDA
using HooksInterface = at::CUDAHooksInterface;
#endif
static constexpr auto TYPE = DeviceType::BACKEND;
static constexpr auto KEY = c10::DispatchKey::BACKEND;

static bool on_device(const Tensor& tensor) { return tensor.device().type() == TYPE; }

static DeviceIndex device_count = 1;
static thread_local DeviceIndex current_device = 0;

// ---- Events: what a GPU program should know about, reported to Python as (kind, detail) ----

static PyObject* event_hook = nullptr;
static std::atomic<bool> recording{false};

static void report(const char* kind, const std::string& detail) {
  if (!recording || !event_hook || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(event_hook, "ss", kind, detail.c_str());
  if (!result) throw py::error_already_set();
  Py_DECREF(result);
}

// ---- Copies between host and device that nothing has waited for yet ----
// A copy to the host arrives when it is waited for; its destination holds 0xCD bytes until then. The source of a copy to
// the device must not change before.

struct PendingCopy {
  Tensor host, bytes;
  bool to_host;
  std::string detail;
};
static std::vector<PendingCopy> pending_copies;
static int64_t num_copies_done = 0;
static std::mutex copies_mutex;

static int64_t copies_so_far() {
  std::lock_guard lock(copies_mutex);
  return num_copies_done + pending_copies.size();
}

static void finish_copies(int64_t until = INT64_MAX) {
  std::vector<PendingCopy> due;
  {
    std::lock_guard lock(copies_mutex);
    auto count = std::clamp<int64_t>(until - num_copies_done, 0, pending_copies.size());
    due.assign(pending_copies.begin(), pending_copies.begin() + count);
    pending_copies.erase(pending_copies.begin(), pending_copies.begin() + count);
    num_copies_done += count;
  }
  for (auto& copy : due) {
    if (copy.to_host) copy.host.copy_(copy.bytes);
    else if (!at::equal(copy.host.view(at::kByte), copy.bytes.view(at::kByte)))
      report("hazard", "changed on the host before it was copied: " + copy.detail);
  }
}

static void synchronize(const std::string& detail) {
  report("sync", detail);
  finish_copies();
}

// ---- Devices and streams: everything runs at once, on the default stream ----

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return TYPE; }
  Device getDevice() const override { return Device(TYPE, current_device); }
  Device exchangeDevice(Device device) const override {
    auto old = getDevice();
    uncheckedSetDevice(device);
    return old;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < device_count, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::DEFAULT, Device(TYPE, device.index() < 0 ? current_device : device.index()));
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return getStream(stream.device()); }
  bool queryStream(const Stream&) const override { return true; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  void synchronizeStream(const Stream&) const override { synchronize("stream"); }
  void synchronizeEvent(void*) const override { synchronize("event"); }
  void synchronizeDevice(const DeviceIndex) const override { synchronize("device"); }
};
C10_REGISTER_GUARD_IMPL(BACKEND, FakeGuard);

// ---- Memory ----

static std::atomic<int64_t> live_bytes{0}, peak_bytes{0};
static std::mutex pinned_mutex;
static std::set<std::pair<char*, size_t>> pinned_ranges;

static void count_bytes(int64_t change) {
  auto live = live_bytes += change, peak = peak_bytes.load();
  while (live > peak && !peak_bytes.compare_exchange_weak(peak, live)) {}
}
static void pin(void* data, size_t size) {
  std::lock_guard lock(pinned_mutex);
  pinned_ranges.insert({(char*)data, size});
}
static void unpin(void* data) {
  std::lock_guard lock(pinned_mutex);
  pinned_ranges.erase(pinned_ranges.lower_bound({(char*)data, 0}));
}
static bool is_pinned(const void* data) {
  std::lock_guard lock(pinned_mutex);
  return std::any_of(pinned_ranges.begin(), pinned_ranges.end(),
                     [&](auto& range) { return data >= range.first && data < range.first + range.second; });
}

struct Allocation {
  void* data = nullptr;
  size_t size = 0;
};
struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto allocation = new Allocation{nullptr, size};
    if (size) TORCH_CHECK(!posix_memalign(&allocation->data, 512, size), "CUDA out of memory");
    count_bytes(size);
    return {allocation->data, allocation, &release, Device(TYPE, current_device)};
  }
  static void release(void* context) {
    auto allocation = (Allocation*)context;
    count_bytes(-(int64_t)allocation->size);
    free(allocation->data);
    delete allocation;
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    TORCH_CHECK(!posix_memalign(&data, 512, std::max<size_t>(size, 1)), "no pinned memory");
    pin(data, size);
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  static void release(void* data) {
    unpin(data);
    free(data);
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
static DeviceMemory device_memory;
static PinnedMemory pinned_memory;

static void reallocate(const Tensor& tensor, size_t size) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (size == storage->nbytes()) return;
  auto data = device_memory.allocate(size);
  if (auto common = std::min(size, storage->nbytes())) memcpy(data.get(), storage->data(), common);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size);
}

// ---- Random generators, and what else torch asks a device for ----

struct FakeGenerator : at::CPUGeneratorImpl {
  explicit FakeGenerator(DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = Device(TYPE, index);
    key_set_ = c10::DispatchKeySet(KEY);
  }
};
static at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> result;
    for (int i = 0; i < 16; i++) result.push_back(at::make_generator<FakeGenerator>(i));
    return result;
  }();
  return generators.at(index < 0 ? current_device : index);
}

struct FakeHooks final : HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<FakeGenerator>(index < 0 ? ::current_device : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(TYPE, ::current_device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { ::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(::current_device, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? ::current_device : exchangeDevice(index);
  }
#ifdef FAKE_MPS
  bool hasMPS() const override { return true; }
  bool isOnMacOSorNewer(unsigned, unsigned) const override { return true; }
  c10::Allocator* getMPSDeviceAllocator() const override { return &device_memory; }
  void deviceSynchronize() const override { synchronize("device"); }
#else
  bool hasCUDA() const override { return device_count > 0; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  int getNumGPUs() const override { return device_count; }
  DeviceIndex current_device() const override { return ::current_device; }
  void deviceSynchronize(DeviceIndex) const override { synchronize("device"); }
  long versionRuntimeCuDNN() const override { return 0; }  // a CUDA build asks before it chooses a kernel of attention
#endif
};

// ---- One memory, seen as a CPU tensor or as a tensor of the device ----

static Tensor with_shape_of(const Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return result;
}
static c10::Storage make_storage(size_t size, c10::DataPtr data, c10::Allocator* allocator) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size, std::move(data), allocator, true);
}
static Tensor as_cpu(const Tensor& tensor) {  // valid while `tensor` is
  if (!tensor.defined() || !on_device(tensor)) return tensor;
  auto& storage = tensor.storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), Device(DeviceType::CPU));
  auto cpu_storage = make_storage(storage.nbytes(), std::move(data), c10::GetAllocator(DeviceType::CPU));
  auto result = with_shape_of(tensor, cpu_storage, c10::DispatchKey::CPU);
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}
static void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(TYPE != DeviceType::MPS || dtype != at::kDouble, "Cannot convert a MPS Tensor to float64 dtype as the "
      "MPS framework doesn't support float64. Please use float32 instead.");
}
static Tensor as_device(const Tensor& tensor, Device device) {  // keeps the storage of `tensor` alive
  check_dtype(tensor.scalar_type());
  struct Kept { c10::Storage storage; };
  auto size = tensor.storage().nbytes();
  count_bytes(size);
  auto release = [](void* context) {
    count_bytes(-(int64_t)((Kept*)context)->storage.nbytes());
    delete (Kept*)context;
  };
  c10::DataPtr data(const_cast<void*>(tensor.storage().data()), new Kept{tensor.storage()}, release, device);
  return with_shape_of(tensor, make_storage(size, std::move(data), &device_memory), KEY);
}

// ---- Every operation without an implementation of its own below: run the CPU's kernel on the same memory ----

// CUDA's kernels for these copy a size to the host.
static const std::set<std::string> SYNCHRONIZING = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal",
    "aten::unique_consecutive", "aten::unique_dim", "aten::repeat_interleave.Tensor", "aten::bincount"};
// These accept indices on the CPU, and look for the true elements of a bool index on the host.
static const std::set<std::string> INDEXING = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};

static std::set<std::string> operations;  // names of those that ran
static std::mutex operations_mutex;

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto num_arguments = schema.arguments().size(), first_argument = stack->size() - num_arguments;
  std::string name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  bool knows_size = name == "aten::repeat_interleave.Tensor" && !stack->back().isNone();
  if (SYNCHRONIZING.count(name) && !knows_size) synchronize(name);
  {
    std::lock_guard lock(operations_mutex);
    operations.insert(name);
  }
  std::vector<Tensor> device_tensors, cpu_tensors;
  std::optional<Device> device;
  auto to_cpu = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) return tensor;
    if (tensor.is_cpu()) {
      TORCH_CHECK(!tensor.dim() || INDEXING.count(name), "Expected all tensors to be on the same device, but found at "
          "least two devices, ", TYPE, " and cpu: ", name, " was given a CPU tensor of shape ", tensor.sizes());
      if (tensor.dim()) report("copy", name + " with an index on the CPU");
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at "
        "least two devices, ", *device, " and ", tensor.device(), ": ", name);
    device = tensor.device();
    device_tensors.push_back(tensor);
    return cpu_tensors.emplace_back(as_cpu(tensor));
  };
  // The CPU's kernels draw from a CPU generator, which gets the state of the device's generator for the call.
  std::vector<std::pair<at::Generator, at::Generator>> generators;  // the device's, the CPU's
  auto to_cpu_generator = [&](at::Generator own) {
    TORCH_CHECK(own.device().type() == TYPE, "Expected a '", TYPE, "' device type for generator but found 'cpu': ", name);
    auto cpu = at::detail::createCPUGenerator();
    cpu.set_state(own.get_state());
    generators.emplace_back(own, cpu);
    return cpu;
  };
  for (size_t i = 0; i < num_arguments; i++) {
    auto& value = (*stack)[first_argument + i];
    if (value.isTensor()) value = to_cpu(value.toTensor());
    else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorList()) tensors.push_back(to_cpu(tensor));
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor && tensor->scalar_type() == at::kBool) synchronize(name + " with a bool index");
        tensors.push_back(tensor ? std::optional<Tensor>(to_cpu(*tensor)) : std::nullopt);
      }
      value = tensors;
    } else if (value.isDevice() && value.toDevice().type() == TYPE) {
      device = value.toDevice();
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator()) value = to_cpu_generator(value.toGenerator());
    else if (value.isNone() && schema.arguments()[i].name() == "generator") value = to_cpu_generator(default_generator(-1));
  }
  if (generators.empty() && op.hasTag(at::Tag::nondeterministic_seeded)) {  // such as dropout
    auto cpu = at::detail::getDefaultCPUGenerator(), own = default_generator(-1);
    auto cpu_state = cpu.get_state();
    cpu.set_state(own.get_state());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    own.set_state(cpu.get_state());
    cpu.set_state(cpu_state);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (auto& [own, cpu] : generators) own.set_state(cpu.get_state());
  auto to_device = [&](const Tensor& result) -> Tensor {
    if (!result.defined() || !result.is_cpu()) return result;
    for (size_t i = 0; i < cpu_tensors.size(); i++) {  // an argument, changed in place
      auto& argument = device_tensors[i];
      if (!result.is_same(cpu_tensors[i])) continue;
      if (result.storage().data() != argument.storage().data() && result.numel()) {  // resized
        reallocate(argument, result.storage().nbytes());
        memcpy(argument.storage().mutable_data(), result.storage().data(), result.storage().nbytes());
      }
      if (result.sizes() != argument.sizes() || result.strides() != argument.strides())
        argument.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
      return argument;
    }
    for (size_t i = 0; i < cpu_tensors.size(); i++)  // a view of an argument
      if (result.storage().nbytes() && result.storage().data() == cpu_tensors[i].storage().data())
        return with_shape_of(result, device_tensors[i].storage(), KEY);
    auto owner = device.value_or(Device(TYPE, current_device));
    return as_device(result, owner.has_index() ? owner : Device(TYPE, current_device));
  };
  auto first_result = stack->size() - schema.returns().size();
  for (size_t i = first_result; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = to_device(value.toTensor());
    else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorList()) tensors.push_back(to_device(tensor));
      value = tensors;
    }
  }
}

// ---- Operations of which a device differs: allocation, copies, and views of its storages ----

static Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  auto to = as_cpu(self), from = as_cpu(source.expand_as(self));
  if (on_device(self) != on_device(source)) {
    auto& host = on_device(self) ? source : self;
    bool pinned = is_pinned(host.storage().data()), asynchronous = pinned && non_blocking;
    std::string detail = c10::str(on_device(self) ? "host to device, " : "device to host, ", pinned ? "pinned" : "pageable",
        non_blocking ? ", " : ", blocking, ", self.scalar_type());
    if (!asynchronous) on_device(self) ? report("copy", detail) : synchronize(detail);
    else if (on_device(source)) {
      auto bytes = at::empty_like(to).copy_(from);
      if (to.is_non_overlapping_and_dense()) memset(to.data_ptr(), 0xCD, to.nbytes());
      std::lock_guard lock(copies_mutex);
      pending_copies.push_back({to, bytes, true, detail});
      return self;
    } else if (source.is_contiguous() && source.sizes() == self.sizes() && source.dtype() == self.dtype()) {
      std::lock_guard lock(copies_mutex);
      pending_copies.push_back({source, source.clone(), false, detail});
    }
  }
  to.copy_(from);
  return self;
}
static Tensor copy_from(const Tensor& source, const Tensor& destination, bool non_blocking) {
  auto result = destination;
  return copy_(result, source, non_blocking);
}
static at::Scalar local_scalar_dense(const Tensor& self) {
  synchronize("item()");
  return as_cpu(self).item();
}
struct OnDevice {  // sets the current device for an allocation
  DeviceIndex old = current_device;
  explicit OnDevice(std::optional<Device> device) {
    if (device && device->index() >= 0) current_device = device->index();
    TORCH_CHECK(current_device < device_count, "CUDA error: invalid device ordinal");
  }
  ~OnDevice() { current_device = old; }
};
static const c10::DispatchKeySet DEVICE_KEYS(KEY);
static Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice on(device);
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_generic(sizes, &device_memory, DEVICE_KEYS, c10::dtype_or_default(dtype), format);
}
static Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice on(device);
  check_dtype(c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, DEVICE_KEYS, c10::dtype_or_default(dtype));
}
static const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto concrete = C10_AS_INTARRAYREF_SLOW(sizes);
  size_t size = (c10::multiply_integers(concrete) + self.storage_offset()) * self.element_size();
  if (size > self.storage().nbytes()) reallocate(self, size);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(concrete);
  return self;
}
static Tensor view(const Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}
static Tensor as_strided(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                         std::optional<c10::SymInt> offset) {
  auto concrete = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), concrete);
}
static Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
static Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
static Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
static Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                           c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  auto concrete = C10_AS_INTARRAYREF_SLOW(sizes);
  if (strides.empty()) impl->set_sizes_contiguous(concrete);
  else impl->set_sizes_and_strides(concrete, C10_AS_INTARRAYREF_SLOW(strides));
  return self;
}
static Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  c10::SymInt length(int64_t(storage.nbytes() / self.element_size()));
  return set_storage(self, storage, 0, length, {});
}

struct IgnoreWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
// A CUDA build of torch has a kernel for most operations, which a fallback does not replace.
static const auto replaced_kernels = [] {
  IgnoreWarnings ignore;
  c10::WarningUtils::WarningHandlerGuard guard(&ignore);  // torch warns once in a process that a kernel is replaced
  std::vector<c10::RegistrationHandleRAII> handles;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getAllOpNamesForDispatchKey(KEY))
    if (name.getNamespace() == "aten")
      handles.push_back(dispatcher.registerImpl(name, KEY,
          c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt, nullptr, "fake_cuda.cpp"));
  return handles;
}();

TORCH_LIBRARY_IMPL(aten, BACKEND, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
}
TORCH_LIBRARY_IMPL(_, BACKEND, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// ---- NCCL: gloo on the same memory ----

#ifndef FAKE_MPS
using namespace c10d;
struct FakeTimer : Timer {
  explicit FakeTimer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, FakeTimer);

using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<Tensor>;

struct FakeWork : Work {  // of gloo, with a future that holds CUDA tensors
  WorkPtr inner;
  Tensors kept, outputs;  // like NCCL, an asynchronous collective keeps its inputs until it is complete
  c10::intrusive_ptr<c10::ivalue::Future> future;
  FakeWork(WorkPtr inner, Tensors kept, Tensors outputs)
      : inner(std::move(inner)), kept(std::move(kept)), outputs(std::move(outputs)) {
    Device device = this->outputs.empty() ? Device(DeviceType::CUDA, current_device) : this->outputs[0].device();
    auto type = c10::ListType::create(c10::TensorType::get());
    future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<Device>{device});
  }
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner->wait(timeout); }
  void synchronize() override { inner->wait(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    inner->wait();
    if (!future->completed()) future->markCompleted(at::IValue(outputs));
    return future;
  }
};

struct FakeNCCL : Backend {
  c10::intrusive_ptr<Backend> gloo;
  FakeNCCL(c10::intrusive_ptr<Backend> gloo, int rank, int size) : Backend(rank, size), gloo(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  static Tensor cpu(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense");
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    return as_cpu(tensor.is_contiguous() ? tensor : tensor.as_strided({tensor.numel()}, {1}));
  }
  static Tensors cpu(const Tensors& tensors) {
    Tensors result;
    for (auto& tensor : tensors) result.push_back(cpu(tensor));
    return result;
  }
  static WorkPtr work(WorkPtr inner, Tensors kept, Tensors outputs) {
    return c10::make_intrusive<FakeWork>(std::move(inner), std::move(kept), std::move(outputs));
  }
  static Tensors joined(Tensors first, const Tensors& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }
  static void report_collective(const char* name, const Tensors& tensors) {
    report("collective", c10::str(name, " of ", tensors[0].numel(), " ", tensors[0].scalar_type()));
  }
  // Gloo has no average: divide before the sum, because gloo writes its result again at every wait.
  ReduceOp divided(const ReduceOp& op, Tensors& tensors, bool in_place) const {
    if (op != ReduceOp::AVG) return op;
    for (auto& tensor : tensors) tensor = in_place ? tensor.div_(getSize()) : tensor.div(getSize());
    return ReduceOp::SUM;
  }

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    report_collective("broadcast", tensors);
    auto on_cpu = cpu(tensors);
    return work(gloo->broadcast(on_cpu, options), on_cpu, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& given) override {
    report_collective("all_reduce", tensors);
    auto on_cpu = cpu(tensors);
    auto options = given;
    options.reduceOp = divided(given.reduceOp, on_cpu, true);
    return work(gloo->allreduce(on_cpu, options), on_cpu, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    report_collective("all_reduce", tensors);
    auto on_cpu = cpu(tensors);
    return work(gloo->allreduce_coalesced(on_cpu, options), on_cpu, tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    report_collective("all_gather", inputs);
    std::vector<Tensors> to{cpu(outputs.at(0))};
    auto from = cpu(inputs);
    return work(gloo->allgather(to, from, options), joined(joined(to[0], from), inputs), outputs[0]);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions& options) override {
    report_collective("all_gather", {input});
    auto to = cpu(output).flatten(), from = cpu(input).flatten();
    return work(gloo->_allgather_base(to, from, options), {to, from, input}, {output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    report_collective("all_gather", inputs);
    auto to = cpu(outputs), from = cpu(inputs);
    return work(gloo->allgather_into_tensor_coalesced(to, from, options), joined(to, from), outputs);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const ReduceScatterOptions& given) override {
    report_collective("reduce_scatter", {output});
    auto to = cpu(output).flatten();
    Tensors from{cpu(input).flatten()};
    auto options = given;
    options.reduceOp = divided(given.reduceOp, from, false);
    return work(gloo->_reduce_scatter_base(to, from[0], options), {to, from[0]}, {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& given) override {
    report_collective("reduce_scatter", outputs);
    auto to = cpu(outputs), from = cpu(inputs);
    auto options = given;
    options.reduceOp = divided(given.reduceOp, from, false);
    return work(gloo->reduce_scatter_tensor_coalesced(to, from, options), joined(to, from), outputs);
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    report_collective("send", tensors);
    auto on_cpu = cpu(tensors);
    return work(gloo->send(on_cpu, destination, tag), on_cpu, tensors);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    report_collective("recv", tensors);
    auto on_cpu = cpu(tensors);
    return work(gloo->recv(on_cpu, source, tag), on_cpu, tensors);
  }
  WorkPtr barrier(const BarrierOptions& given) override {
    synchronize("barrier");
    BarrierOptions options;
    options.timeout = given.timeout;
    return gloo->barrier(options);
  }
};

#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(TYPE, &device_memory, 200);
  // torch caches its hooks before this module can register others. Neither class has data: replace the table of methods.
  static FakeHooks hooks;
#ifdef FAKE_MPS
  auto& replaced = at::detail::getMPSHooks();
#else
  auto& replaced = at::detail::getCUDAHooks();
#endif
  *(void**)const_cast<HooksInterface*>(&replaced) = *(void**)&hooks;
  m.def("set_count", [](int count) { device_count = count; });
  m.def("set_hook", [](py::object hook) { event_hook = hook.release().ptr(); });
  m.def("record", [](bool on) { recording = on; });
  m.def("get_device", [] { return (int)current_device; });
  m.def("exchange_device", [](int index) {
    TORCH_CHECK(index < device_count, "CUDA error: invalid device ordinal");
    return (int)std::exchange(current_device, DeviceIndex(index < 0 ? current_device : index));
  });
  m.def("generator", [](int index) { return default_generator(index); });
  m.def("copies_so_far", &copies_so_far);
  m.def("finish_copies", &finish_copies, py::arg("until") = INT64_MAX);
  m.def("synchronize", &synchronize);
  m.def("reallocate", [](Tensor tensor, int64_t size) { reallocate(tensor, size); });
  m.def("pin", [](int64_t data, int64_t size) { pin((void*)data, size); });
  m.def("unpin", [](int64_t data) { unpin((void*)data); });
  m.def("live_bytes", [] { return live_bytes.load(); });
  m.def("peak_bytes", [] { return peak_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = live_bytes.load(); });
  m.def("operations", [] { return operations; });
#ifndef FAKE_MPS
  py::class_<FakeNCCL, c10::intrusive_ptr<FakeNCCL>, Backend>(m, "FakeNCCL")
      .def(py::init<c10::intrusive_ptr<Backend>, int, int>());
#endif
}
